"""Report what is missing to prove a hang on a device backend: counters that move, native frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from distdiag.diagnosis.model.snapshot import Life, Snapshot
from distdiag.monitor.evidence.native import HostWait
from distdiag.monitor.ranks.state import RankView
from distdiag.terms.backends import blocks_host

# Beats of the pulse, which reads the counters: 10 s. A watchdog notices completions within some 100 ms; the first collective may
# take seconds to connect. Counted in beats, not seconds, because the pulse is late on a busy machine.
SETTLED_BEATS = 40
STILL_S = 10.0  # without progress on any rank
LONG_S = 60.0  # without progress on any rank, although hosts are known to wait
STEPS = 10  # steps and collectives without a counted completion


@dataclass(slots=True)
class _Counter:
    completed: int
    beats: int
    step: int
    enqueued: int


class MissingEvidence:
    """Follows the counters of device groups."""

    def __init__(self) -> None:
        self._counters: dict[tuple[int, int], _Counter] = {}

    @staticmethod
    def unknown_hosts(s: Snapshot) -> Iterator[tuple[str, str, int]]:
        """Yield (key, text, rank) if operations are in flight, no rank makes progress, and no host is known to wait."""
        ranks = [r for r in s.ranks.values() if r.life in (Life.RUNNING, Life.STARTING)]
        still = [r for r in ranks if r.activity_since_s is not None and s.t_s - r.activity_since_s >= STILL_S]
        if len(still) < len(s.ranks) or any(r.blocked is not None or r.host_wait == HostWait.DEVICE for r in ranks):
            return
        for r in still:
            if r.host_wait is None:
                continue  # not asked yet, or it cannot be asked, which `missing` reports
            for name, issued in r.enqueued.items():
                group = s.groups.get(name)
                if group is None or blocks_host(group.backend) or r.completed.get(name, -1) >= issued or not issued:
                    continue
                text = (
                    f"no rank has made progress for {STILL_S:.0f} s, and rank {r.rank} has operations of group {name} "
                    f"({group.backend}) in flight, but its native frames do not show that its host waits for them"
                    + (f" (it is in {r.host_wait_in})" if r.host_wait_in else "")
                    + ": a hang there is not proved"
                )
                yield "unknown_hosts", text, r.rank
                return

    @staticmethod
    def unknown_operations(s: Snapshot) -> Iterator[tuple[str, str, int]]:
        """Yield (key, text, rank) if no rank makes progress for a minute, and a rank's operations in flight are not known."""
        living = [r for r in s.ranks.values() if r.life in (Life.RUNNING, Life.STARTING)]
        if any(r.activity_since_s is None or s.t_s - r.activity_since_s < LONG_S for r in living):
            return
        for r in living:
            for name, issued in r.enqueued.items() if r.blocked is None else ():
                group = s.groups.get(name)
                if group is not None and not blocks_host(group.backend) and issued > 0 and name not in r.completed:
                    text = (
                        f"no rank has made progress for {LONG_S:.0f} s, and no counter shows which operations of group {name} "
                        f"({group.backend}) rank {r.rank}'s device has completed: what it is in cannot be seen, nor a hang there"
                    )
                    yield f"unknown_operations/{name}", text, r.rank
                    return

    def missing(self, views: Mapping[int, RankView]) -> Iterator[tuple[str, str, int]]:
        """Yield (key, text, rank) for each input that a proof of a hang lacks."""
        for rank, view in views.items():
            if view.ending is not None or not view.device.groups:
                continue
            page, h = view.decoder.page, view.header
            if h.trace_signal and not (Path(view.reader.path).parent / f"r{rank}.native").exists():
                text = (
                    f"native frames of rank {rank} cannot be read (no compiled module, or the job uses the signal): a wait of its "
                    "host for the device cannot be seen, so a hang there is not proved"
                )
                yield f"native/{rank}", text, rank
            for i in view.device.groups:
                group = page.groups[i]
                last = self._counters.get((rank, i))
                if last is None or group.completed != last.completed or group.completed == group.enqueued:
                    self._counters[rank, i] = _Counter(group.completed, h.beats, h.step, group.enqueued)
                elif h.beats - last.beats >= SETTLED_BEATS and h.step - last.step >= STEPS and not h.n_peers:
                    if group.enqueued - last.enqueued < STEPS:
                        continue  # not in use, or in a captured graph
                    yield f"counters/{rank}/{i}", self._text(view, i), rank

    @staticmethod
    def _text(view: RankView, group: int) -> str:
        slot, name = view.decoder.page.groups[group], view.decoder.group_key(group)
        consequence = "waits in it are not judged"
        if slot.completed < 0:
            why = "no completed collectives are counted (is the flight recorder off, or the backend without one?)"
            consequence = "waits in it are inferred from what all ranks have issued"
        else:
            why = f"no completion after #{slot.completed} was noticed while its steps continue (is the backend's watchdog stuck?)"
        return f"rank {view.rank}, group {name} ({view.text(slot.backend)}): {why}; {consequence}"
