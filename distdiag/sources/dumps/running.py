"""Decides whether dumps are of a running or a stuck job: a dump may be taken of either."""

from __future__ import annotations

from distdiag.sources.dumps.culprits import Blame
from distdiag.sources.dumps.load_report import LoadReport

# A rank was only on its way if, when its dump was written, others had waited for it less than this (and far less than the
# timeout), or not much longer than its repeated pauses.
YOUNG_S, USUAL_FACTOR = 2.0, 2.0
REAL_TIME_S = 0.005  # entries that span less are not those of a job
MOVING_S = 5.0  # shorter waits are not a hang if a rank had just made progress
APART_S = 30.0  # files of one round of dumps are written within this time


def was_running(loaded: LoadReport, blame: Blame) -> bool:
    """True if the dumps are of a job that was making progress: a rank that is late in them had just not arrived yet."""
    return _continued(loaded) or _moved(loaded, blame) or _just_begun(loaded, blame)


def _longest_wait_s(loaded: LoadReport, blame: Blame) -> float | None:
    """Return an upper bound of how long a rank had waited when its dump, or that of the rank it waits for, was taken.

    None if file times are not usable. They are usable if a file was written after its own newest entry, and the entries span
    some time; not if the clock differs. A copy's time is only later, which hides no wait.
    """
    spans = [loaded.newest_s[r] - loaded.oldest_s[r] for r in loaded.newest_s]
    if max(spans, default=0.0) <= REAL_TIME_S:
        return None
    waits: list[float] = []
    begun = _begun(loaded, blame)
    for r in {*blame.victims, *blame.culprits, *blame.extra, *blame.waited_for_since_s}:
        since = [t for t in (blame.waited_for_since_s.get(r), begun.get(r)) if t is not None]
        written, newest = loaded.modified_s.get(r), loaded.newest_s.get(r)
        if not since and (r not in blame.waited_for_since_s or r in blame.idle):
            continue
        if not since or written is None or newest is None or written < newest:
            return None
        waits.append(written - min(since))
    return max(waits, default=None)


def _begun(loaded: LoadReport, blame: Blame) -> dict[int, float]:
    """Return since when each rank may have waited. Entries that its ring lost were issued earlier."""
    known = {r: c.entered_s for r, c in blame.oldest.items()}
    begun = {r: known.get(r) or loaded.oldest_s.get(r) for r in {*blame.victims, *known}}
    return {r: t for r, t in begun.items() if t is not None}


def _just_begun(loaded: LoadReport, blame: Blame) -> bool:
    """True if no rank had waited for long, or for much longer than the ranks waited for have paused before."""
    longest = _longest_wait_s(loaded, blame)
    usual = max((loaded.usual_gap_s.get(r, 0.0) for r in blame.waited_for_since_s), default=0.0)
    young_s = YOUNG_S if loaded.timeout_s is None else min(YOUNG_S, loaded.timeout_s / 4)
    return longest is not None and longest < max(young_s, USUAL_FACTOR * usual)


def _continued(loaded: LoadReport) -> bool:
    """True if one dump is older by whole collectives: the job continued, so the last rank in it was not stuck.

    False if the files' times show that the older one was taken long before.
    """
    late = [t for r, t in loaded.modified_s.items() if r not in loaded.stale]
    early = [t for r, t in loaded.modified_s.items() if r in loaded.stale]
    return bool(loaded.stale) and not (late and early and min(late) - max(early) > APART_S)


def _moved(loaded: LoadReport, blame: Blame) -> bool:
    """True if a rank had just made progress when its dump was taken, and no rank had waited for long by then.

    File times may not show when a dump was taken; operations that it found complete before the watchdog do.
    """
    since = _begun(loaded, blame).values()
    if not loaded.moved_s:
        return False
    usual = max(loaded.usual_gap_s.values(), default=0.0)
    return not since or max(loaded.moved_s.values()) - min(since) < max(MOVING_S, USUAL_FACTOR * usual)
