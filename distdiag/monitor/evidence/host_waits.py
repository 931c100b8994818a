"""Find hosts that wait for their devices: native frames of ranks without progress while operations are in flight.

A proof needs them: counters that do not move do not show what the host will do next. A proof must hold in two polls, so two
samples must agree; until then every poll takes one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from distdiag import files
from distdiag.monitor.evidence import native, signals
from distdiag.monitor.evidence.native import HostWait
from distdiag.monitor.ranks.state import RankView
from distdiag.page.layout import Blocked

STILL_S = 0.3  # a rank without progress for this long is sampled
ANSWER_S = 0.05  # for a rank's signal handler
GIVEN_UP_S = 0.2  # after this time without an answer, polls are no longer brought forward
AGREE_S = 0.2  # least time between two samples that agree
AGAIN_S = 1.0  # between samples once two agree


@dataclass(slots=True)
class _Rank:
    mark: tuple[Any, ...]
    symbols: native.Symbols
    asked_ns: int = 0
    asked_s: float = -10.0
    kind: HostWait | None = None
    name: str = ""
    since_s: float = 0.0  # first sample of this kind
    confirmed: bool = False  # two samples agree: sampled less often from now on


class HostWaits:
    """What the host of each rank without progress waits for."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self.next_s: float | None = None  # run time of the next useful poll

    @property
    def asks(self) -> bool:
        return bool(self._ranks)

    def of(self, rank: int) -> tuple[str, str] | None:
        """Return (what the host waits for, the native function that shows it or that it is in); None if not known."""
        r = self._ranks.get(rank)
        return (str(r.kind), r.name) if r is not None and r.kind is not None else None

    def sample(self, now_s: float, views: Mapping[int, RankView], stopped: Collection[int]) -> None:
        """Read the answers since the last poll, and ask ranks that make no progress; does not wait."""
        open_somewhere = any(v.ending is None and v.device.has_open() for v in views.values())
        self.next_s = None
        for v in views.values():
            still_s = v.still_s(now_s)
            if not open_somewhere or v.ending is not None or v.rank in stopped or still_s < STILL_S or not _asks(v):
                self._ranks.pop(v.rank, None)
                if open_somewhere and 0.0 < still_s < STILL_S:
                    self._poll_at(now_s + STILL_S - still_s)
                continue
            mark = v.progress_mark()
            r = self._ranks.get(v.rank)
            if r is None or r.mark != mark:
                symbols = r.symbols if r is not None else native.Symbols(v.header.pid)
                r = self._ranks[v.rank] = _Rank(mark, symbols)
            elif r.asked_ns:
                self._take(r, v, now_s)
            if now_s - r.asked_s >= (AGAIN_S if r.confirmed else 0.0):
                self._ask(r, v, now_s)
            if r.kind is None and r.asked_ns and now_s - r.asked_s < GIVEN_UP_S:
                self._poll_at(now_s + ANSWER_S)

    def _poll_at(self, t_s: float) -> None:
        self.next_s = t_s if self.next_s is None else min(self.next_s, t_s)

    def _ask(self, r: _Rank, v: RankView, now_s: float) -> None:
        h = v.header
        r.asked_s = now_s
        if not files.is_file(v.reader.path.parent, v.file("native").name):  # the signal handler is not ours
            return
        try:
            r.asked_ns = v.decoder.start_ns + int(now_s * 1e9)
            signals.send(h.pid, h.trace_signal - 1, v.reader.path)
        except OSError:
            r.asked_ns = 0

    def _take(self, r: _Rank, v: RankView, now_s: float) -> None:
        sample = native.read(v.file("native"))
        if sample is None or sample.taken_ns < r.asked_ns:
            return
        frames = r.symbols.frames(sample)
        kind, name = native.host_wait([frame.name for frame in frames])
        if kind == HostWait.NO:
            function = native.unknown_backend(frames, v.history.in_backend())
            if function is not None:
                kind, name = HostWait.DEVICE, function
            else:
                name = native.innermost(frames)
        if kind != r.kind:
            r.kind, r.name, r.since_s, r.confirmed = kind, name, now_s, False
        elif now_s - r.since_s >= AGREE_S:
            r.confirmed = True


def _asks(v: RankView) -> bool:
    """True if this rank should be asked: it uses a device backend, and its hooks do not show where it waits."""
    h = v.header
    return bool(v.device.groups) and bool(h.trace_signal) and h.blocked != Blocked.GROUP
