"""Evidence from calls that were paired silently: equal operations from different lines complete together.

A barrier in a retry pairs with the barrier after it. The job hangs later, in calls that are innocent; the
first pair of calls from different sites is the divergence.
"""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.diagnosis.culprit import callers
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.culprit.parting import Condition, parting
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.phrases import at, op_at
from distdiag.diagnosis.waits import compatible


def accuse(case: Case) -> Testimony | None:
    """Accuse the one side whose call at a new site was paired with a call of the others at another site."""
    if case.wait.p2p or case.wait.seq is None:
        return None
    found = [(side, pair) for side in case.sides if (pair := _first_pair(case, side)) is not None]
    if len(found) != 1:
        return None
    ((side, (made, due)),) = found
    conditions = _conditions(case, side, made, due)
    who, call = rank_list(side), f"{compatible.op_name(made.op)}{at(made.site)}"
    text = f"; {who} had made one call more, {call}, which paired with {compatible.op_name(due.op)}{at(due.site)} of the others"
    return Testimony(
        ranks=tuple(side),
        text=text,
        head=f"only {who} made {op_at(made)}",
        advice=_advice(call, who, conditions),
        conditions=tuple(conditions),
    )


def _first_pair(case: Case, side: Sequence[int]) -> tuple[Call, Call] | None:
    """Return (its call, that of the others) of the newest pair from different sites, if all of the side made
    it and no other rank has ever been at its site; None if the others' call has not followed on it since: it
    then replaced that call."""
    group, now = case.wait.group, case.wait.seq
    others = [rank for rank in case.compared if rank not in side]
    first, rest = case.states[side[0]], [case.states[rank] for rank in others]
    elsewhere = set().union(*(state.sites for state in rest))
    for made in first.calls:
        if made.group != group or made.p2p or made.seq is None or made.site is None or made.seq >= now:
            continue
        if made.site.key in elsewhere:
            continue
        due = [_at(state, made) for state in rest]
        if not all(_at(case.states[rank], made) == made.site.key for rank in side) or len(set(due)) != 1:
            return None
        (their_site,) = set(due)
        follows = (c for c in (*first.calls, first.blocked) if c is not None and c.group == group and not c.p2p)
        later = any(c.site is not None and c.site.key == their_site and (c.seq or 0) > made.seq for c in follows)
        theirs = next((c for c in rest[0].calls if (c.group, c.seq) == (group, made.seq) and not c.p2p), None)
        once = first.sites.get(made.site.key, 0) == sum(c.site == made.site for c in first.calls)
        return (made, theirs) if theirs is not None and later and once else None
    return None


def _at(state: RankState, call: Call) -> str | None:
    same = (c for c in state.calls if (c.group, c.seq) == (call.group, call.seq) and not c.p2p)
    site = next((c.site for c in same), None)
    return site.key if site is not None else None


def _conditions(case: Case, side: Sequence[int], made: Call, due: Call) -> list[Condition]:
    """Return the conditions that lead to its site and not to that of the others."""
    source = case.source
    if made.site is None or due.site is None:
        return []
    other = next(rank for rank in case.compared if rank not in side)
    mine, theirs = (
        callers.stack_at(site, case.states[rank], source) for site, rank in ((made.site, side[0]), (due.site, other))
    )
    return parting(mine, theirs, source)


def _advice(call: str, who: str, conditions: Sequence[Condition]) -> str:
    if conditions and conditions[0].text.startswith("except"):
        return (
            f"make no collective call in `except` that the other ranks do not make: leave out {call}, or let all ranks agree "
            "on the failure first (all_reduce a flag) and try again together"
        )
    around = f": `{conditions[0].text}` keeps it to {who}" if conditions else ""
    return f"make {call} on all ranks or on none{around}"
