"""Witness by rhythm: the number of collectives between visits of a site shows which rank is there too early, or missing.

A rank that enters the barrier at the end of its epoch after fewer collectives than ever has left its loop early. A rank that is
still in its loop when that barrier should follow has stayed too long.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from distdiag.diagnosis.culprit.call_site import site_of
from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import RankState, Snapshot
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Ranks whose visit to a site differs from the earlier visits of all ranks, in collectives of the group between visits."""

    ranks: tuple[int, ...]  # with a different number of collectives
    gap: int  # collectives before this visit
    usual: int  # collectives before each earlier visit

    @property
    def early(self) -> bool:
        """True if they are at the site too early; else they are missing there."""
        return self.gap < self.usual


def _gaps(
    states: Mapping[int, RankState],
    meeting: tuple[str, int],
    here: Mapping[int, str | None],
    side: Collection[int],
    others: Collection[int],
) -> tuple[int, int] | None:
    """Return (collectives since the last visit, collectives between earlier visits) of a side; None if those varied.

    All known earlier intervals (two at most) must be equal, on both sides.
    """
    group, seq = meeting
    found: set[tuple[int, int]] = set()
    for r in side:
        key = here.get(r) or ""
        seen = states[r].visits.get(group, {}).get(key, ())
        if len(seen) < 3 or seen[-1] != seq:
            return None
        gaps = [b - a for a, b in itertools.pairwise(seen)]
        if len(set(gaps[:-1])) != 1:
            return None
        for q in others:
            theirs = states[q].visits.get(group, {}).get(key, ())
            if theirs[1 - len(seen) :] != seen[:-1]:
                return None
        found.add((gaps[-1], gaps[0]))
    return found.pop() if len(found) == 1 else None


def out_of_rhythm(
    states: Mapping[int, RankState],
    meeting: tuple[str, int],
    here: Mapping[int, str | None],
    first: Collection[int],
    second: Collection[int],
) -> Rhythm | None:
    """Return which of two sides is too early at its call, or missing at the other one; None if neither.

    Args:
        meeting: (group, sequence number) of the collective in which their calls differ.
        here: Each rank's site.
        first, second: The sides.
    """
    gaps = _gaps(states, meeting, here, first, second), _gaps(states, meeting, here, second, first)
    early = [g is not None and g[0] < g[1] for g in gaps]
    if all(early):
        return None
    for side, g, too_early in zip((first, second), gaps, early, strict=True):
        if g is not None and too_early:
            return Rhythm(tuple(sorted(side)), *g)
    due = [g[1] if g is not None and g[0] == g[1] else 0 for g in gaps]
    if due[0] == due[1]:
        return None
    return Rhythm(tuple(sorted(second if due[0] > due[1] else first)), max(due), max(due))


def rhythm_of(snapshot: Snapshot, wait: Wait) -> Rhythm | None:
    """Return the same for the two sides of a conflict."""
    if wait.p2p or wait.seq is None or len(wait.sides) != 2:
        return None
    states = snapshot.ranks
    here = {r: site_of(states.get(r), c) for r, c in wait.calls.items()}
    return out_of_rhythm(states, (wait.group, wait.seq), here, *wait.sides)


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the evidence that these ranks are at their site too early, or not where all came at this point; None if not."""
    found = rhythm_of(case.snapshot, case.wait)
    if found is None or found.ranks != tuple(ranks):
        return None
    who, own = rank_list(ranks), case.wait.calls[ranks[0]]
    if found.early:
        text = f"; {who} got there after {found.gap:,} collectives; earlier, all ranks got there after {found.usual:,}"
        left, call = "early in", own
    else:
        text = (
            f"; {who} should be in the other call, too: at earlier visits it followed after {found.usual:,} collectives"
        )
        left, call = "not in", case.wait.calls[min(next(side for side in case.wait.sides if ranks[0] not in side))]
    return Testimony(
        name=Reason.RHYTHM,
        ranks=found.ranks,
        text=text,
        advice=f"find why {who} {verb(ranks, 'is', 'are')} {left} {compatible.op_name(call.op)}{at(call.site)}: fewer or more "
        "batches, a break, return or skipped batch on some ranks only",
    )
