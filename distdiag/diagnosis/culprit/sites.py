"""Evidence from call sites: who is, or has been, where the others never were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distdiag.diagnosis.culprit.case import Case, Testimony, site_of
from distdiag.diagnosis.culprit.conditions import met_in
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.guards import takes_turns
from distdiag.diagnosis.model.snapshot import Life, RankState, lines_of
from distdiag.diagnosis.text.incident import verb


def new(case: Case) -> Testimony | None:
    """Accuse the one side of a tie at a site that the other never visited; not where each has a line of its own for that call."""
    ranks = _one_side(case, _is_new)
    at_line = case.wait.calls[ranks[0]].site if ranks else None
    turns = at_line is not None and takes_turns(at_line, case.source)
    return None if turns else _only_there(case, ranks)


def history(case: Case) -> Testimony | None:
    """Accuse the one side of a tie that has visited every site of the other, and at least one more."""
    ranks = _one_side(case, lambda case, mine, rest: _knows_more(case.states, case.here, mine, rest))
    text = f"; {rank_list(ranks)} {verb(ranks, 'has', 'have')} made collective calls at a line where the others have never been"
    return Testimony(ranks=tuple(ranks), text=text) if ranks else None


def knows_more_than_ended(case: Case) -> Testimony | None:
    """Accuse the only rank that waits for ranks that ended normally, if it made calls that they never made."""
    waiting, states, ended = case.waiting, case.states, case.compared
    normally = all(states[q].life == Life.FINISHED and not states[q].exit_code for q in ended)
    if len(waiting) != 1 or not normally or not case.incident.victims <= case.graph.victims_of(waiting) | set(waiting):
        return None
    here = {r: site_of(states[r], states[r].blocked) for r in waiting}
    return Testimony(ranks=tuple(waiting)) if _knows_more(states, here, waiting, ended) else None


def _one_side(case: Case, test: Callable[[Case, list[int], list[int]], bool]) -> list[int]:
    """Return the side of a tie of which a test is true, if it is not true of both."""
    if not case.tie:
        return []
    first, second = case.sides
    a, b = test(case, first, second), test(case, second, first)
    return [] if a == b else first if a else second


def _only_there(case: Case, ranks: Sequence[int]) -> Testimony | None:
    if not ranks:
        return None
    first = lines_of(case.here[ranks[0]] or "")[:1]
    by_others = any(lines_of(key)[:1] == first for q in case.compared if q not in ranks for key in case.states[q].sites)
    where = "come to that line from there" if by_others else "been at that line"  # the site has its callers
    # ranks that the evidence does not compare may have been there
    others = (state for q, state in case.states.items() if q not in case.compared)
    among = "of these ranks, " if any(case.here[ranks[0]] in state.sites for state in others) else ""
    text = f"; {among}only {rank_list(ranks)} {verb(ranks, 'has', 'have')} ever {where}"
    return Testimony(ranks=tuple(ranks), text=text)


def _is_new(case: Case, odd: Sequence[int], rest: Sequence[int]) -> bool:
    """True if `odd` are at sites that `rest` never visited, and have visited the sites of `rest` themselves.

    Where roles have their own lines: they are there for the first time, and have met the calls of `rest` in another line.
    """
    states, here = case.states, case.here
    theirs = {here.get(b) for b in rest}
    used = set().union(*(states[b].sites for b in rest))

    def knows(a: int) -> bool:
        once = states[a].sites.get(here.get(a) or "", 0) == 1
        return theirs <= states[a].sites.keys() or (once and all(met_in(case, a, b) is not None for b in rest))

    def visited(key: str | None) -> bool:  # of an abort, the callers of the line are not known
        return key is None or any(site == key or site.startswith(f"{key} < ") for site in used)

    return None not in theirs and all(not visited(here.get(a)) and knows(a) for a in odd)


def _knows_more(
    states: dict[int, RankState], here: dict[int, str | None], odd: Sequence[int], rest: Sequence[int]
) -> bool:
    """True if `odd` have visited every site that `rest` have, and at least one more."""
    if not all(states[b].sites for b in rest):
        return False
    common = set().union(*(_past(states[b], here.get(b)) for b in rest))
    everywhere = common.union(*(states[b].sites for b in rest))
    return all(common <= set(states[a].sites) and _past(states[a], here.get(a)) - everywhere for a in odd)


def _past(state: RankState, here: str | None) -> set[str]:
    """Return the sites a rank has visited, not counting the call it is in now."""
    return {site for site, n in state.sites.items() if n - (site == here) > 0}
