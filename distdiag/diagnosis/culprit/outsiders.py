"""Evidence from groups: a rank called a collective of a group that it is not a member of, which returned at once and did nothing.

The members wait there for one of their own, and that one called another group's: the cycle that follows has no wrong order.
"""

from __future__ import annotations

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at


def accuse(case: Case) -> Testimony | None:
    """Accuse the ranks of a cycle that passed another group at the site where a rank of the cycle waits, if not all did."""
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
