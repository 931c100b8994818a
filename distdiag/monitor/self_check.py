"""Findings about distdiag itself: what it could not see or write. Each is reported once."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity
from distdiag.diagnosis.model.snapshot import Group, Life, RankState, Snapshot
from distdiag.diagnosis.text.phrases import at
from distdiag.monitor.evidence.native import HostWait
from distdiag.monitor.ranks.state import RankView
from distdiag.store.writer import Writer
from distdiag.terms.backends import blocks_host
from distdiag.terms.units import counted

CLOCK_JUMP_S = 2.0  # of the wall clock against the monotonic one
DRIVER_SILENT_S = 20.0  # NVML calls take milliseconds; initialising eight cards without persistence mode takes seconds
DISK = re.compile(r"full|no space|quota|disk i/o|read-?only|unable to open|permission", re.IGNORECASE)
ADVICE = {
    "disk_full": "free the disk, or see in `dmesg` what is wrong with it",
    "device_waits": "keep the flight recorder on (TORCH_FR_BUFFER_SIZE), and install distdiag with a C compiler",
    "unfollowed": "see where its ranks are with `distdiag dump`",
    "driver_silent": "see if `nvidia-smi` answers on this node; if not, drain it",
    "clock_skew": "compare times of this run by their differences, not by the clock",
}
_NOT_KNOWN = "who waits for whom in it is not known from then on, so waits in it are not judged"
UNFOLLOWED = {
    "reconfigure": ("gave other members to", _NOT_KNOWN),
    "shrink_group": ("took ranks out of", _NOT_KNOWN),
    "abort": ("aborted", "calls that are open in it end with that, so waits in it are not judged"),
    "new_window": (
        "made a one-sided window in",
        "puts, gets and signals show no peer, so waits for them are not judged",
    ),
}

SHOWN = 4  # texts of one finding
# Beats of the pulse, which reads the counters: 10 s. A watchdog notices completions within some 100 ms; the first collective may
# take seconds to connect. Counted in beats, not seconds, because the pulse is late on a busy machine.
SETTLED_BEATS = 40
STILL_S = 10.0  # without progress on any rank
LONG_S = 60.0  # without progress on any rank, although hosts are known to wait
STEPS = 10  # steps and collectives without a counted completion


class Fault(NamedTuple):
    """What distdiag could not do; each `key` is reported once."""

    key: str
    cause: str
    text: str
    rank: int | None = None
    severity: Severity = Severity.INFO


@dataclass(slots=True)
class _Counter:
    completed: int
    beats: int
    step: int
    enqueued: int


class MissingEvidence:
    """Finds what is missing to prove a hang on a device backend: counters that move, native frames."""

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
            # a rank without a kind of wait was not asked yet, or cannot be asked, which `missing` reports
            for g, done in _on_device(s, r) if r.host_wait is not None else ():
                if done is None or done < r.enqueued[g.name]:
                    text = (
                        f"no rank has made progress for {STILL_S:.0f} s, and rank {r.rank} has operations of group {g.name} "
                        f"({g.backend}) in flight, but its native frames do not show that its host waits for them"
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
            for g, done in _on_device(s, r) if r.blocked is None else ():
                if done is None:
                    text = (
                        f"no rank has made progress for {LONG_S:.0f} s, and no counter shows which operations of group {g.name} "
                        f"({g.backend}) rank {r.rank}'s device has completed: what it is in cannot be seen, nor a hang there"
                    )
                    yield f"unknown_operations/{g.name}", text, r.rank
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


def _on_device(s: Snapshot, r: RankState) -> Iterator[tuple[Group, int | None]]:
    """Yield the groups on a device in which a rank has issued operations, with the newest that is known to be complete."""
    for name, issued in r.enqueued.items():
        group = s.groups.get(name)
        if group is not None and not blocks_host(group.backend) and issued > 0:
            yield group, r.completed.get(name)


class OwnFaults:
    """Makes the findings of kind `recorder`, and remembers which were reported."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._device = MissingEvidence()
        self._device_waits: dict[int, list[str]] = {}  # by rank: what its findings have shown
        self.found: list[Finding] = []  # all so far, for the summary: on a full disk only that can show them

    def faults(
        self,
        t_s: float,
        views: Mapping[int, RankView],
        failures: Iterable[str],
        writer: Writer,
        started_unix_s: float,
        *,
        exchange: str | None = None,
        driver_silent_s: float | None = None,
        damaged: Mapping[str, tuple[int | None, str]] | None = None,
        contradicted: Iterable[Finding] = (),
        snapshot: Snapshot | None = None,
        elsewhere: Iterable[tuple[int, str, str]] = (),
    ) -> list[Finding]:
        """Return the new findings of kind `recorder`; `elsewhere`: what monitors of other nodes could not do."""
        found = [fault for v in views.values() for fault in self.of_rank(v)]
        for file, (rank, why) in (damaged or {}).items():
            whose = f"rank {rank}" if rank is not None else "one rank"
            text = f"the page of {whose} cannot be read ({why}): {whose} is not judged"
            found.append(Fault(f"damaged/{file}", "damaged_page", text, rank, Severity.WARNING))
        found += self._of_devices(views, snapshot)
        for n, f in enumerate(contradicted, 1):
            text = f"proofs that the job has contradicted: {n}; the newest, cleared at {f.cleared_s or t_s:.1f} s: {f.kind}: {f.message}"
            found.append(Fault(f"contradicted/{f.key}", "contradicted", text))
        jump_s = time.time() - started_unix_s - t_s
        if abs(jump_s) > CLOCK_JUMP_S:
            text = (
                f"this host's wall clock was set {'forward' if jump_s > 0 else 'back'} by {abs(jump_s):.0f} s during the "
                "run: dates may disagree with logs by that; durations do not"
            )
            found.append(Fault("clock", "clock_skew", text))
        if exchange:
            text = f"{exchange}: ranks of other nodes are not judged together with these"
            found.append(Fault("exchange", "nodes", text))
        if driver_silent_s is not None and driver_silent_s > DRIVER_SILENT_S:
            text = "NVIDIA's driver does not answer: GPU numbers are missing from now on"
            found.append(Fault("driver", "driver_silent", text, severity=Severity.WARNING))
        if failed := "; ".join(failures):  # one finding for all
            found.append(Fault(failed, "failed", f"rules of the diagnosis failed: {failed}"))
        if writer.failed_writes and writer.last_error:
            text = f"the run could not be written: {writer.last_error}"
            cause = "disk_full" if DISK.search(writer.last_error) else "failed"
            found.append(Fault(text, cause, text, severity=Severity.WARNING))
        found += self._of_nodes(elsewhere)
        new = [self._finding(fault, t_s) for fault in found if fault.key not in self._reported]
        self.found += new
        return new

    @staticmethod
    def of_rank(v: RankView) -> Iterator[Fault]:
        h, q, facts = v.header, v.rank, v.decoder.facts
        if h.errors:
            text = f"the recorder of rank {q} failed {counted(h.errors, 'time')}: {v.text(h.error)}"
            severity = Severity.INFO if h.n_calls else Severity.WARNING  # without calls it may see no hang
            yield Fault(f"failed/{q}", "failed", text, q, severity)
        if h.dropped:
            text = f"rank {q} dropped {h.dropped} records or more; its numbers are incomplete"
            yield Fault(f"dropped/{q}", "dropped", text, q)
        texts = [
            f"rank {q} {did} {group}{at(site)}: {lost}"
            for what, group, site in v.decoder.unfollowed
            if group != "?" and what in UNFOLLOWED
            for did, lost in (UNFOLLOWED[what],)
        ]
        if texts:  # one finding: its key has no group
            yield Fault(f"unfollowed/{q}/{len(texts)}", "unfollowed", "; ".join(texts), q)
        if missing := facts.get("unsupported"):
            text = f"torch {facts.get('torch', '?')} lacks what distdiag uses: {missing}; what depends on it is not recorded"
            yield Fault(f"unsupported/{missing}", "unsupported_torch", text)  # of all ranks

    @staticmethod
    def _of_nodes(elsewhere: Iterable[tuple[int, str, str]]) -> Iterator[Fault]:
        found: dict[str, dict[int, str]] = {}
        for node, cause, text in elsewhere:
            found.setdefault(cause if cause in ADVICE else "failed", {}).setdefault(node, text)
        for cause, texts in found.items():  # one finding: its key has no node
            text = "; ".join(f"node {node}: {text}" for node, text in [*texts.items()][:SHOWN])
            more = f"; and {len(texts) - SHOWN} more nodes" if len(texts) > SHOWN else ""
            yield Fault(f"nodes/{cause}/{len(texts)}", cause, text + more, severity=Severity.WARNING)

    def _of_devices(self, views: Mapping[int, RankView], snapshot: Snapshot | None) -> Iterator[Fault]:
        missing = [self._device.missing(views)]
        if snapshot is not None:
            missing += [self._device.unknown_hosts(snapshot), self._device.unknown_operations(snapshot)]
        for key, text, q in chain.from_iterable(missing):
            if key not in self._reported:  # one finding: its key has no group
                texts = self._device_waits.setdefault(q, [])
                texts.append(text)
                more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
                yield Fault(key, "device_waits", "; ".join(texts[:SHOWN]) + more, q)

    def _finding(self, fault: Fault, t_s: float) -> Finding:
        self._reported.add(fault.key)
        return Finding(
            kind="recorder",
            cause=fault.cause,
            severity=fault.severity,
            certainty=Certainty.PROVED,
            culprits=() if fault.rank is None else (fault.rank,),
            first_seen_s=t_s,
            detected_s=t_s,
            message=fault.text,
            cost="none" if fault.cause == "clock_skew" else "none for the job; distdiag sees less",
            advice=ADVICE.get(fault.cause, "report it with the run's directory"),
        )
