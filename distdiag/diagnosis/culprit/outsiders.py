"""Evidence from groups: a rank called a collective of a group that it is not a member of, or did not create a group.

Such a collective returns at once and does nothing: the members wait for one of their own, and the cycle that follows has no wrong
order. A group that only its members create shifts the number, so the name, of every later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Group, Snapshot
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at


def created(snapshot: Snapshot) -> tuple[int, list[Group]] | None:
    """Return the first number of `new_group` under which ranks created different groups, and these, largest first."""
    by_number: dict[int, dict[tuple[int, ...], Group]] = {}
    for group in snapshot.groups.values():
        if group.number is not None and len(group.ranks) > 1:  # a group of one rank has no others to find
            by_number.setdefault(group.number, {})[group.ranks] = group
    if any("#" in name for name in snapshot.groups):  # torch counts from 0 again after destroy_process_group
        return None
    number = min((n for n, made in by_number.items() if len(made) > 1), default=None)
    made = by_number.get(-1 if number is None else number, {})
    return (number, sorted(made.values(), key=lambda g: (-len(g.ranks), g.ranks))) if number is not None else None


def left_out(made: Sequence[Group]) -> tuple[tuple[int, ...], Group] | None:
    """Return (the ranks that have gone on to the next group without creating this one, this group); None otherwise."""
    if len(made) != 2 or not set(made[1].ranks) < set(made[0].ranks):
        return None
    return tuple(sorted(set(made[0].ranks) - set(made[1].ranks))), made[1]


def accuse(case: Case) -> Testimony | None:
    """Accuse the ranks of a cycle that passed another group at the site where a rank of the cycle waits, if not all did."""
    if any(call is not None and call.op == "new_group" for call in case.calls.values()):
        return _not_created(case)
    waited = {call.site.key for call in case.calls.values() if call is not None and call.site is not None}
    states = (case.states[rank] for rank in case.compared if rank in case.states)
    outside = ((state.rank, x) for state in states for x in state.samples if x.kind == "not_a_member" and x.site)
    found = {rank: sample for rank, sample in outside if sample.site is not None and sample.site.key in waited}
    if not found or len(found) == len(case.compared):
        return None
    ranks = tuple(sorted(found))
    sample = found[ranks[0]]
    who, members = rank_list(ranks), verb(ranks, "it is no member of", "they are no members of")
    return Testimony(
        ranks=ranks,
        text=f"; {who} called {sample.name}{at(sample.site)} in a group that {members}, where it returns at once",
        advice=f"find why {who} {verb(ranks, 'passes', 'pass')} another group{at(sample.site)}: choose the group by its "
        "members (`dist.get_process_group_ranks`), not by a number that is computed from the rank",
    )


def _not_created(case: Case) -> Testimony | None:
    """Accuse the ranks that wait in `new_group` under the number of a group that the others created before."""
    made = created(case.snapshot)
    found = left_out(made[1]) if made is not None else None
    if found is None or not set(found[0]) < set(case.compared):
        return None
    ranks, group = found
    head = f"{rank_list(ranks)} did not create the group of {rank_list(group.ranks)}{at(group.site)}"
    return Testimony(ranks=ranks, head=head)
