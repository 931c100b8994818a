"""Evidence from calls that were paired silently: equal operations from different lines complete together.

A barrier in a retry pairs with the barrier after it. The job hangs later, in calls that are innocent; the
first pair of calls from different sites is the divergence.
"""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.diagnosis.culprit import callers
from distdiag.diagnosis.culprit.case import Case, Testimony, site_of
from distdiag.diagnosis.culprit.paths import conditions_between
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call
from distdiag.diagnosis.text.phrases import at, op_at
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import call_at


def accuse(case: Case) -> Testimony | None:
    """Accuse the one side whose call at a new site was paired with a call of the others at another site."""
    if case.wait.p2p or case.wait.seq is None:
        return None
    found = [(side, pair) for side in case.sides if (pair := _first_pair(case, side)) is not None]
    if len(found) != 1:
        return None
    ((side, (made, due)),) = found
    other = next(rank for rank in case.compared if rank not in side)
    ends = (made, side[0]), (due, other)
    mine, theirs = (callers.stack_at(call.site, case.states[rank], case.source) for call, rank in ends)
    conditions = tuple(conditions_between(mine, theirs, case.source))
    who, call = rank_list(side), f"{compatible.op_name(made.op)}{at(made.site)}"
    text = f"; {who} had made one call more, {call}, which paired with {compatible.op_name(due.op)}{at(due.site)} of the others"
    advice = f"make {call} on all ranks or on none" + (
        f": `{conditions[0].text}` keeps it to {who}" if conditions else ""
    )
    if conditions and conditions[0].text.startswith("except"):
        advice = (
            f"make no collective call in `except` that the other ranks do not make: leave out {call}, or let all ranks agree "
            "on the failure first (all_reduce a flag) and try again together"
        )
    head = f"only {who} made {op_at(made)}"
    return Testimony(ranks=tuple(side), text=text, head=head, advice=advice, conditions=conditions)


def _first_pair(case: Case, side: Sequence[int]) -> tuple[Call, Call] | None:
    """Return (its call, that of the others) of the newest pair from different sites, if all of the side made
    it and no other rank has ever been at its site; None if the others' call has not followed on it since: it
    then replaced that call."""
    group, now = case.wait.group, case.wait.seq
    first, rest = case.states[side[0]], [case.states[rank] for rank in case.compared if rank not in side]
    elsewhere = set().union(*(state.sites for state in rest))
    own = (c for c in first.calls if c.group == group and not c.p2p and c.seq is not None and c.seq < now)
    made = next((c for c in own if c.site is not None and c.site.key not in elsewhere), None)
    if made is None or made.site is None or made.seq is None:
        return None
    seq, theirs = made.seq, call_at(rest[0], group, made.seq)
    mine = [case.states[rank] for rank in side]
    here, due = ({site_of(None, call_at(state, group, seq)) for state in states} for states in (mine, rest))
    if here != {made.site.key} or len(due) != 1 or None in due:
        return None
    follows = (c for c in (*first.calls, first.blocked) if c is not None and c.group == group and not c.p2p)
    later = any(site_of(None, c) in due and (c.seq or 0) > seq for c in follows)
    once = first.sites.get(made.site.key, 0) == sum(c.site == made.site for c in first.calls)
    return (made, theirs) if theirs is not None and later and once else None
