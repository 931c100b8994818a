"""Decides whether dumps are of a running or a stuck job: a dump may be taken of either; and whether the ranks that others wait for
were still working when they were taken: late, and not stopped."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.diagnosis.model.snapshot import Call, Site, Snapshot
from distdiag.sources.dumps.culprits import Blame
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.times import DUMPED_WITHIN_S

# A rank was only on its way if, when its dump was written, others had waited for it less than this (and far less than the
# timeout), or not much longer than its repeated pauses.
YOUNG_S, USUAL_FACTOR = 2.0, 2.0
REAL_TIME_S = 0.005  # entries that span less are not those of a job
MOVING_S = 5.0  # shorter waits are not a hang if a rank had just made progress
APART_S = 30.0  # files of one round of dumps are written within this time


def was_running(loaded: LoadReport, blame: Blame) -> bool | None:
    """True if the dumps are of a job that was making progress: a rank that is late in them had just not arrived yet.

    No rank had waited for long, or for much longer than the ranks waited for have paused before. None if only entries suggest that:
    files as of a copy do not show when the dumps were taken, so it may have hung since.
    """
    longest = _longest_wait_s(loaded, blame)
    usual = max((loaded.times[r].usual_gap_s for r in blame.waited_for_since_s), default=0.0)
    if longest is not None and longest < max(_young_s(loaded), USUAL_FACTOR * usual):
        return True
    by_entries = _continued(loaded) or _moved(loaded, blame) or _asked_early(loaded, blame)
    return by_entries and (_written_at_once(loaded) or None)


def _written_at_once(loaded: LoadReport) -> bool:
    """True if all files were written together, within seconds of the newest entry: no copies."""
    written = [t.written_s for t in loaded.times.values() if t.written_s is not None]
    newest = max((t.newest_s for t in loaded.times.values() if t.newest_s is not None), default=0.0)
    return bool(written) and newest - APART_S < min(written) and max(written) - newest < APART_S


def _longest_wait_s(loaded: LoadReport, blame: Blame) -> float | None:
    """Return an upper bound of how long a rank had waited when its dump, or that of the rank it waits for, was taken.

    None if file times are not usable. They are usable if a file was written after its own newest entry, and the entries span
    some time; not if the clock differs. A copy's time is only later, which hides no wait.
    """
    ends = [(t.oldest_s, t.newest_s) for t in loaded.times.values()]
    if max((b - a for a, b in ends if a is not None and b is not None), default=0.0) <= REAL_TIME_S:
        return None
    waits: list[float] = []
    begun = _begun(loaded, blame)
    for r in {*blame.victims, *blame.culprits, *blame.waited_for_since_s}:
        since = [t for t in (blame.waited_for_since_s.get(r), begun.get(r)) if t is not None]
        times = loaded.times[r]
        if not since and (r not in blame.waited_for_since_s or r in blame.idle):
            continue
        if not since or times.written_s is None or times.newest_s is None or times.written_s < times.newest_s:
            return None
        waits.append(times.written_s - min(since))
    return max(waits, default=None)


def _begun(loaded: LoadReport, blame: Blame) -> dict[int, float]:
    """Return since when each rank may have waited. Entries that its ring lost were issued earlier."""
    known = {r: c.entered_s for r, c in blame.oldest.items()}
    # all but the few that are ahead have nothing in flight
    waiting = known if blame.alone else {*blame.victims, *known}
    begun = ((r, known.get(r) or loaded.times[r].oldest_s) for r in waiting)
    return {r: t for r, t in begun if t is not None}


def _young_s(loaded: LoadReport) -> float:
    return min([YOUNG_S, *(limit_s / 4 for limit_s in loaded.timeouts_s.values())])


def _asked_early(loaded: LoadReport, blame: Blame) -> bool:
    """True if entries show a dump of operations that were just begun, and files, as of a copy, show no later one."""
    timed = [(loaded.times[r], since) for r, since in _begun(loaded, blame).items() if r in loaded.times]
    waits = [(t.asked_s - since, (t.written_s or 0.0) - since) for t, since in timed if t.asked_s is not None]
    copied_s = max(loaded.timeouts_s.values(), default=0.0) + DUMPED_WITHIN_S
    return bool(waits) and not blame.silent and all(a < _young_s(loaded) and not 0 < w < copied_s for a, w in waits)


def _continued(loaded: LoadReport) -> bool:
    """True if one dump is older by whole collectives: the job continued, so the last rank in it was not stuck.

    False if the files' times show that the older one was taken long before.
    """
    written = [(r in loaded.stale, t.written_s) for r, t in loaded.times.items() if t.written_s is not None]
    early, late = ([t for stale, t in written if stale is which] for which in (True, False))
    return bool(loaded.stale) and not (late and early and min(late) - max(early) > APART_S)


def _moved(loaded: LoadReport, blame: Blame) -> bool:
    """True if a rank had just made progress when its dump was taken, and no rank had waited for long by then.

    File times may not show when a dump was taken; operations that it found complete before the watchdog do.
    """
    since = _begun(loaded, blame).values()
    moved = [t.moved_s for t in loaded.times.values() if t.moved_s is not None]
    if not moved:
        return False
    usual = max(t.usual_gap_s for t in loaded.times.values())
    return not since or max(moved) - min(since) < max(MOVING_S, USUAL_FACTOR * usual)


@dataclass(frozen=True, slots=True)
class Working:
    """What all culprits did until their dumps were taken."""

    call: Call  # the newest one of them
    ago_s: float  # before the dump, the longest of them
    waited_s: float  # the others had waited so long by then, at least
    per_s: float | None  # such calls; None if there are too few
    site: Site | None  # the line of the function shared with a waiting rank from which the culprits have not returned


def still_working(snapshot: Snapshot, loaded: LoadReport, blame: Blame) -> Working | None:
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
    return Working(last, max(gaps), waited_s, loaded.rates.get(first), _apart_at(loaded, first, waiting))


def _apart_at(loaded: LoadReport, rank: int, waiting: int) -> Site | None:
    """Return the outermost frame of the rank whose function the waiting rank is in, too, at another line; None if there is none."""
    for mine, theirs in zip(loaded.stacks.get(rank, ()), loaded.stacks.get(waiting, ()), strict=False):
        if (mine.file, mine.function) != (theirs.file, theirs.function):
            return None
        if mine.line != theirs.line:
            return mine
    return None
