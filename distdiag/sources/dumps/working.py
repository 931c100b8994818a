"""Finds out whether the ranks that others wait for were still working when the dumps were taken: late, and not stopped."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.diagnosis.model.snapshot import Call, Site, Snapshot
from distdiag.sources.dumps.culprits import Blame
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.running import MOVING_S, YOUNG_S


@dataclass(frozen=True, slots=True)
class Working:
    """What all culprits did until their dumps were taken."""

    call: Call  # the newest one of them
    ago_s: float  # before the dump, the longest of them
    waited_s: float  # the others had waited so long by then, at least
    per_s: float | None  # such calls; None if there are too few
    site: Site | None  # the line of the function shared with a waiting rank from which the culprits have not returned


def find(snapshot: Snapshot, loaded: LoadReport, blame: Blame) -> Working | None:
    """Return what the culprits did; None if one of them had made no call just before its own file was written.

    Calls of a group that has waiting ranks, too, prove nothing: another thread, as of a heartbeat, may make them on all ranks.
    """
    if blame.alone or blame.crossed or blame.circle:
        return None
    newest: list[Call] = []
    gaps: list[float] = []
    for q in blame.culprits:
        call, times = loaded.newest.get(q), loaded.times.get(q)
        open_since = (c.entered_s for c in snapshot.ranks[q].calls if c.completed_s is None and c.entered_s is not None)
        if call is None or times is None or call.entered_s is None or times.written_s is None:
            return None
        ago_s = times.written_s - call.entered_s
        if not 0 <= ago_s < YOUNG_S or min(open_since, default=call.entered_s) < times.written_s - YOUNG_S:
            return None
        if not set(blame.culprits).issuperset(snapshot.groups[call.group].ranks):
            return None
        newest.append(call)
        gaps.append(ago_s)
    main = blame.main
    entered = [c.entered_s for c in main.calls.values() if c.entered_s is not None] if main is not None else []
    if not newest or main is None or not entered:
        return None
    last = max(newest, key=lambda c: c.entered_s or 0.0)
    waited_s = (last.entered_s or 0.0) - min(entered)
    if waited_s < MOVING_S:
        return None
    waiting = next(iter(sorted(main.calls)))
    first = blame.culprits[0]
    return Working(last, max(gaps), waited_s, loaded.rates.get(first), _apart(loaded, first, waiting))


def _apart(loaded: LoadReport, rank: int, waiting: int) -> Site | None:
    """Return the outermost frame of the rank whose function the waiting rank is in, too, at another line; None if there is none."""
    for mine, theirs in zip(loaded.stacks.get(rank, ()), loaded.stacks.get(waiting, ()), strict=False):
        if (mine.file, mine.function) != (theirs.file, theirs.function):
            return None
        if mine.line != theirs.line:
            return mine
    return None
