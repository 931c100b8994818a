"""The critical path of the recorded steps across ranks: which rank's work, and which transfers, set how long a step takes.

From the end of the last step we go back in time, through the compute and the idle time of one rank, to the moment when it waited
for communication and had nothing to compute. There the path is the collective or message that was in flight: *transfer* back to the moment
when its last rank came, and from there on the work of that rank. A collective that begins where another one ends was queued
behind it. Communication that compute hides delays nothing and is not on the path.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from distdiag.traces.analyse import Joined, Recorded, last_rank
from distdiag.traces.intervals import Coverage, Spans, union, without
from distdiag.traces.model import CriticalPath, PathTime

QUEUED_US = 50.0  # between two collectives of one stream
IN_FLIGHT = 64  # collectives at a time that are searched


@dataclass(slots=True)
class _Passed:
    """One collective as one rank saw it; times in µs."""

    start: float
    end: float
    came: float  # its last rank
    last_rank: int


@dataclass(slots=True)
class _Rank:
    begin: float
    compute: Spans
    busy: Coverage  # by `compute`
    other: Coverage  # communication that is in `passed` of no rank and that compute does not hide
    data: Coverage  # waits for the data loader outside of all these
    passed: list[_Passed] = field(default_factory=list)  # ascending by their end
    exposed: Spans = field(default_factory=list)


def critical_path(
    collectives: Joined, recorded: Mapping[int, Recorded], computes: Mapping[int, Spans], steps: int
) -> CriticalPath | None:
    """Return the critical path in ms per step; None without collectives that ranks share."""
    if not collectives:
        return None
    ranks = _ranks(collectives, recorded, computes)
    own = {q: [0.0, 0.0, 0.0, 0.0] for q in ranks}  # compute, idle, data, unmatched communication
    rank = max(recorded, key=lambda q: recorded[q].window[1])
    at = end = recorded[rank].window[1]
    transfer_us, came = 0.0, False
    while True:
        r = ranks[rank]
        before = _queued_behind(r, at) if came else None
        since, cause = before or _waited_for(r, at)
        since = min(since, at)
        busy, other, data = (x.within(since, at) for x in (r.busy, r.other, r.data))
        for i, us in enumerate((busy, at - since - busy - other - data, data, other)):
            own[rank][i] += us
        at = since
        if cause is None:
            break
        until = max(cause.came, ranks[cause.last_rank].begin)
        transfer_us += max(0.0, at - until)
        at, rank, came = min(at, until), cause.last_rank, True
    per = 1e3 * steps
    parts = [
        PathTime(rank=q, compute_ms=c / per, idle_ms=i / per, data_ms=d / per, unmatched_ms=u / per)
        for q, (c, i, d, u) in own.items()
        if c + i + d + u > 0
    ]
    return CriticalPath(
        step_ms=(end - at) / per,
        transfer_ms=transfer_us / per,
        ranks=sorted(parts, key=lambda r: -(r.compute_ms + r.idle_ms + r.data_ms + r.unmatched_ms)),
    )


def _ranks(collectives: Joined, recorded: Mapping[int, Recorded], computes: Mapping[int, Spans]) -> dict[int, _Rank]:
    """Return what each rank computed and waited for."""
    matched = {id(c) for of_rank in collectives.values() for c in of_rank.values()}
    ranks = {}
    for q, r in recorded.items():
        unmatched = union(((c.start, c.end) for c in r.trace.comms if id(c) not in matched), *r.window)
        other = without(unmatched, computes[q])
        data = without(without(union(r.trace.loads, *r.window), computes[q]), other)
        ranks[q] = _Rank(r.window[0], computes[q], Coverage(computes[q]), Coverage(other), Coverage(data))
    for of_rank in collectives.values():
        last = last_rank(of_rank)
        for q, c in of_rank.items():
            ranks[q].passed.append(_Passed(c.start, c.end, of_rank[last].start, last))
    for q, r in ranks.items():
        r.passed.sort(key=lambda p: p.end)
        r.exposed = without(union(((p.start, p.end) for p in r.passed), *recorded[q].window), r.compute)
    return ranks


def _queued_behind(r: _Rank, at: float) -> tuple[float, _Passed] | None:
    """Return the collective that ended where one begins, at `at`; None if there is none."""
    i = bisect_right(r.passed, at, key=lambda p: p.end) - 1
    p = r.passed[i] if i >= 0 else None
    if p is None or at - p.end > QUEUED_US or p.came >= p.end or p.end <= r.begin:
        return None
    return p.end, p


def _waited_for(r: _Rank, at: float) -> tuple[float, _Passed | None]:
    """Return when the rank last waited for a collective before `at`, and which; or the begin of its steps, and None."""
    for k in range(bisect_left(r.exposed, at, key=lambda span: span[0]) - 1, -1, -1):
        until = min(at, r.exposed[k][1])
        first = bisect_left(r.passed, until, key=lambda p: p.end)
        near = (p for p in r.passed[first : first + IN_FLIGHT] if p.start < until)
        if (found := next((p for p in near if p.came < until), None)) is not None:
            return until, found
    return r.begin, None
