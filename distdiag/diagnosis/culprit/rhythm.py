"""Evidence from rhythm: the number of collectives between visits of a site shows which rank is there too early, or missing.

A rank that enters the barrier at the end of its epoch after fewer collectives than ever has left its loop early. A rank that is
still in its loop when that barrier should follow has stayed too long. The last visits of a site are kept for longer than the calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at, places_text
from distdiag.diagnosis.waits import compatible

ROUNDS = 3  # earlier ones in which a rank was at each of two sites


def accuse(case: Case) -> Testimony | None:
    """Accuse the side that is early or missing by the numbers of collectives between visits, else by how often it was at each site."""
    if len(case.sides) != 2 or case.wait.p2p:
        return None
    return _by_gaps(case) or _by_turns(case)


def _by_turns(case: Case) -> Testimony | None:
    """Accuse the side that is at the second of two sites, if all ranks have been at both equally often, and first at the other.

    Of DDP's collectives only the lines are listed.
    """
    sites = [{case.here[rank] for rank in side} for side in case.sides]
    here = [site for there in sites for site in there if site is not None]
    if len(here) != 2 or any(len(there) != 1 for there in sites) or here[0] == here[1]:
        return None
    for odd, (due, made) in ((1, here), (0, here[::-1])):
        rounds = {_rounds(case, rank, due, made) for rank in case.compared}
        if None not in rounds:
            who, call = rank_list(case.sides[odd]), case.wait.calls[case.sides[1 - odd][0]]
            text = f"; in {min(n or 0 for n in rounds):,} earlier rounds every rank was at {places_text(due)} before {places_text(made)}"
            advice = f"find why {who} left out {compatible.op_name(call.op)}{at(call.site)} in this round"
            return Testimony(ranks=tuple(case.sides[odd]), text=text, advice=advice)
    return None


def _rounds(case: Case, rank: int, due: str, made: str) -> int | None:
    """Return how often a rank has left each of two sites, if it was first at `due`; None unless that is equally often."""
    seen = case.states[rank].sites
    left = {seen.get(site, 0) - (site == case.here[rank]) for site in (due, made)}
    order = [site for site in seen if site in (due, made)]  # in the order of the first visits
    return left.pop() if len(left) == 1 and min(left) >= ROUNDS and order == [due, made] else None


def _by_gaps(case: Case) -> Testimony | None:
    """Accuse the one of two sides that is at its site after fewer collectives than all ranks were before, or is missing at
    the other's, where all came after as many."""
    gaps = [_gaps(case, side, other) for side, other in (case.sides, case.sides[::-1])]
    early = [i for i, found in enumerate(gaps) if found is not None and found[0] < found[1]]
    due = [found[1] if found is not None and found[0] == found[1] else 0 for found in gaps]
    if len(early) == 2 or (not early and due[0] == due[1]):
        return None
    # the side at the site where they are early, or the others missing
    there = early[0] if early else due.index(max(due))
    odd = case.sides[there if early else 1 - there]
    gap, usual = gaps[there] or (0, 0)
    who, call = rank_list(odd), case.wait.calls[case.sides[there][0]]
    if early:
        text = f"; {who} made that call again after {gap:,} collectives; until now, all ranks made it every {usual:,} collectives"
    else:
        text = f"; {who} should be in {compatible.op_name(call.op)}{at(call.site)}, too: until now, all ranks made that call every {usual:,} collectives"
    there = f"{verb(odd, 'is', 'are')} {'early' if early else 'not'} in {compatible.op_name(call.op)}{at(call.site)}"
    advice = f"find why {who} {there}: fewer or more batches, a break or return on some ranks only, a branch on the data (no token for an expert)"
    return Testimony(ranks=tuple(odd), text=text, advice=advice)


def _gaps(case: Case, side: Collection[int], others: Collection[int]) -> tuple[int, int] | None:
    """Return (collectives since the last visit, collectives between earlier visits) of a side; None if those varied.

    All known earlier intervals (two at most) must be equal, on both sides.
    """
    group, seq = case.wait.group, case.wait.seq
    found: set[tuple[int, int]] = set()
    for r in side:
        key = case.here[r] or ""
        seen = case.states[r].visits.get(group, {}).get(key, ())
        theirs = {case.states[q].visits.get(group, {}).get(key, ())[1 - len(seen) :] for q in others}
        if len(seen) < 3 or seen[-1] != seq or theirs != {seen[:-1]}:
            return None
        *before, last = [b - a for a, b in itertools.pairwise(seen)]
        if len(set(before)) != 1:
            return None
        found.add((last, before[0]))
    return found.pop() if len(found) == 1 else None
