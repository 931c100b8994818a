"""Evidence from the source: conditions on the rank that lead to one side's call, and conditions on data."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from distdiag.diagnosis.culprit import backward, callers, divergence, paths
from distdiag.diagnosis.culprit.case import Case, Testimony, site_of
from distdiag.diagnosis.culprit.paths import Condition, Way
from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, Site, lines_of
from distdiag.diagnosis.text.conditions import decision_advice, left_text
from distdiag.diagnosis.text.incident import implicit_text
from distdiag.diagnosis.text.phrases import op_at
from distdiag.diagnosis.waits import compatible, messages
from distdiag.diagnosis.waits.wait import call_at, calls_until


def on_rank(case: Case) -> Testimony | None:
    """Accuse the ranks that a condition on the rank names, if exactly one of two sides is under one."""
    firsts = [side[0] for side in case.sides]
    if len(firsts) != 2 or not all(rank in case.states for rank in firsts):
        return None
    if met_in(case, *firsts) is not None:
        return None
    mine, theirs = (_stack(case, rank) for rank in firsts)
    found = paths.led_away(mine, theirs, case.source)
    return _testimony(case, found[:1], case.sides[found[1]]) if found is not None else None


def between_sides(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the conditions that can have led these ranks, or without any the two sides, to another call."""
    if ranks:
        if (parted := _earlier(case, ranks)) is not None:
            return _at_departure(case, ranks, *parted)
        return _testimony(case, _between(case, ranks), ranks) or _left_backward(case, ranks)
    if not (found := tied(case)):
        return None
    first, second = (case.wait.calls[side[0]].site for side in case.sides[:2])
    apart = first is not None and second is not None and first.key != second.key
    first_one = f"`{found[0].text}` at line {found[0].line}"
    advice = f"find on which rank {first_one} had the wrong result, or let all ranks decide together (all_reduce what it tests)"
    if found[0].keeps_results or found[0].is_loop:
        advice = decision_advice(found[0], ())
    elif found[0].text.startswith("except"):
        advice = (
            f"find which rank caught an exception there ({first_one}: log it with its traceback), and let all ranks agree on the "
            "failure before they go on (all_reduce a flag)"
        )
    return Testimony(conditions=tuple(found), advice=advice if apart and len(found) == 1 else "")


def by_handler(case: Case) -> Testimony | None:
    """Accuse the larger of two sides if only a handler of an error can have led it past the other's call, which it has made less often."""
    first, second, *more = case.sides
    found, here = _between(case, first), case.here.get(second[0]) or ""
    times = [[case.states[q].sites.get(here, 0) for q in side if q in case.states] for side in (first, second)]
    fewer = not more and all(times) and max(times[0]) < min(times[1])
    by_errors = bool(found) and all(condition.failed and condition.way is Way.SKIPPED for condition in found)
    return _testimony(case, found, first) if fewer and by_errors else None


def _earlier(case: Case, ranks: Sequence[int]) -> tuple[Call, Call] | None:
    """Return (the first call of these ranks that differs from the others', the call that was due), if all calls since were paired."""
    others = [rank for rank in case.compared if rank not in ranks and rank in case.states]
    if not others or ranks[0] not in case.states or case.wait.seq is None:
        return None
    groups = {wait.group for wait in case.incident.waits}
    both = (divergence.history(case.states[q], case.calls.get(q), groups) for q in (ranks[0], others[0]))
    found = divergence.departure(*both)
    if found is None or found.rank != ranks[0] or found.made is None or found.due is None:
        return _paired(case, ranks[0], others)
    made, due = found.made, found.due
    before = made.seq is not None and made.group == case.wait.group == due.group and made.seq < case.wait.seq
    return (made, due) if before and made.site is not None and due.site is not None and made.site != due.site else None


def _paired(case: Case, rank: int, others: Sequence[int]) -> tuple[Call, Call] | None:
    """Return (a rank's only calls at a line where the others have never been, the call of theirs that the first was paired with).

    That call has followed on it since: else it was made instead, as where each role has its own lines.
    """
    state, group, theirs = case.states[rank], case.wait.group, case.states[others[0]]
    calls = ((c, c.seq, c.site.key) for c in calls_until(state, state.blocked) if c.group == group and c.seq and c.site)
    own = [x for x in calls if x[1] <= case.wait.seq]
    elsewhere = set().union(*(case.states[q].sites for q in others))
    made, seq, key = next((x for x in own[:-1] if x[2] not in elsewhere), (None, 0, ""))
    due = call_at(theirs, group, seq) if made is not None else None
    if made is None or due is None or due.site is None:
        return None
    once = state.sites.get(key, 0) == sum(x[2] == key for x in own)
    return (made, due) if once and any(x[2] == due.site.key and x[1] > seq for x in own) else None


def _at_departure(case: Case, ranks: Sequence[int], made: Call, due: Call) -> Testimony | None:
    """Return the conditions that led these ranks to the call `made` instead of the one that was due."""
    other = next(rank for rank in case.compared if rank not in ranks and rank in case.states)
    ends = (made, ranks[0]), (due, other)
    mine, theirs = (callers.stack_at(call.site, case.states[rank], case.source) for call, rank in ends)
    # a call that the others make, too, only comes earlier: what was due has been left out
    skipped = made.site is not None and made.site.key in case.states[other].sites
    found = paths.conditions_between(mine, theirs, case.source, paths.Pair(ahead=skipped))
    alone = bool(found) and found[0].way in (Way.ALONE, Way.STAYED)
    if not found or (alone and skipped):
        return None
    head = f"only {rank_list(ranks)} made {op_at(made)}" if alone else f"{rank_list(ranks)} skipped {op_at(due)}"
    head = left_text(ranks, due) if found[0].way is Way.LEFT else head
    advice = decision_advice(found[0], ranks, made if alone else due) if len(found) == 1 else ""
    return Testimony(ranks=tuple(ranks), head=head, advice=advice, conditions=tuple(found))


def past_the_call(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the conditions that can have led the first of these ranks past the call that others wait for; without ranks, what keeps a
    collective of the cycle to some of its members."""
    if not ranks:
        return _kept_to_some(case)
    state, source, main = case.states.get(ranks[0]), case.source, case.main(ranks)
    if state is None or not main.ranks:
        return None
    stack = _frames(case, ranks[0])
    if main.p2p:
        # the site of its newest message of this kind, else of another rank of the ring, if that is in a function on its stack
        wanted = main.ranks[0], main.group, messages.OPPOSITE[main.key[2]]
        own = (c for c in state.calls[::-1] if c.p2p and (c.peer, c.group, messages.direction_of(c)) == wanted)
        sent = ((q, c, c.peer) for q, c in case.calls.items() if c and c.p2p and c.peer is not None)
        ring = (messages.other_end(case.states.get(peer), q, c) for q, c, peer in sent)
        site = next((c.site for c in itertools.chain(own, ring) if c is not None and c.site is not None), None)
        here = [i for i, x in enumerate(stack) if site and (x.file, x.function) == (site.file, site.function)]
        if site is None or not here:
            return None
        return _testimony(case, paths.conditions_between(stack[: here[0] + 1], (site,), source), ranks)
    own = case.own_call(ranks[0], main)
    if own is not None and own.site is not None:
        return _testimony(case, paths.conditions_between(stack, (*own.site.path, *stack[-1:]), source), ranks)
    site = next((call.site for rank in main.ranks if (call := main.calls.get(rank)) is not None), None)
    victims = (case.states[q] for q in sorted(case.incident.victims - set(ranks)))
    there = [v.rank for v in victims if v.blocked is not None and v.blocked.site == site]
    waiting = {q: _frames(case, q) for q in [*main.ranks, *there][: callers.COMPARED] if q in case.states}
    if not waiting:
        return None
    there = waiting[callers.nearest(stack, waiting, source)]
    if case.in_a_new_round(ranks[0]):  # its message is one of every round: what leads to it there has led no rank away
        stack = callers.in_common(stack, there, source)
    return _testimony(case, paths.conditions_between(stack, there, source), ranks)


def _kept_to_some(case: Case) -> Testimony | None:
    """Return the condition on the rank that keeps the one collective of a cycle to the ranks in it, and not to those that it waits for."""
    found: dict[Condition, tuple[list[int], Call]] = {}
    for wait in case.incident.waits:
        inside = [q for q in sorted(wait.calls) if q in case.states]
        missing = [q for q in sorted(wait.missing & case.incident.members) if q in case.states]
        if inside and missing and not wait.p2p:
            condition = paths.rank_condition(_frames(case, inside[0]), _frames(case, missing[0]), case.source)
            if condition is not None and condition.way is Way.ALONE:
                found[condition] = inside, wait.calls[inside[0]]
    if len(found) != 1:
        return None
    ((condition, (inside, call)),) = found.items()
    return Testimony(conditions=(condition,), advice=decision_advice(condition, inside, call))


def leaving(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the conditions through which a rank that ended normally can have left the loop that another rank is in."""
    wait, ended = case.main(()), case.states[min(case.incident.members)]
    stacks = [stack for rank in wait.ranks if not wait.p2p and (stack := case.states[rank].user_stack)]
    found = paths.leaving(ended.current_site, stacks[0], case.source) if stacks else []
    if not found:
        return None
    advice, (first, call) = "", next(iter(wait.calls.items()), (-1, None))
    # what is left out of DDP's own calls ends with the loop: then the advice is to end it together
    by_python = call is not None and not implicit_text(case.states.get(first), call)
    if by_python and len(found) == 1 and found[0].way is Way.SKIPPED:
        advice = decision_advice(found[0], sorted(case.incident.members), call)
    return Testimony(ranks=tuple(ranks), conditions=tuple(found), advice=advice)


def _testimony(case: Case, found: Sequence[Condition], ranks: Sequence[int]) -> Testimony | None:
    if not found:
        return None
    main = case.main(ranks)
    rank, call = next(((q, call) for q, call in main.calls.items() if q not in ranks), (-1, None))
    if (alone := found[0].way in (Way.ALONE, Way.AGAIN)) and ranks:
        rank, call = ranks[0], case.calls.get(ranks[0])
    ddp = call is not None and bool(implicit_text(case.states.get(rank), call))
    if main.p2p and call is not None and not alone:  # its own half of the message
        call = Call(op=messages.OPPOSITE[main.key[2]], group=main.group, peer=rank)
    inside = call is not None and not ddp and callers.is_inside(call, case.source)
    advice = decision_advice(found[0], ranks, call, ddp, inside) if len(found) == 1 else ""
    return Testimony(ranks=tuple(ranks), conditions=tuple(found), advice=advice)


def tied(case: Case) -> list[Condition]:
    """Return where the paths of two sides diverge, if neither is known to be wrong; nothing if that is not known."""
    found = [condition for side in case.sides[:2] for condition in _between(case, side)]
    return list({(c.file, c.line): c for c in found}.values())[-paths.SHOWN :]


def _between(case: Case, ranks: Sequence[int]) -> list[Condition]:
    known = [rank for rank in sorted(case.wait.calls) if rank in case.states]
    mine, others = [q for q in known if q in ranks], [q for q in known if q not in ranks]
    if not mine or not others:
        return []
    both = mine[0], others[0]
    first, second = (_stack(case, rank) for rank in both)
    own = met_in(case, *both)
    if own is not None:
        due = (*own.path, *(x for x in first[-1:] if x not in own.path))
        elsewhere = own.key != case.here.get(mine[0]) and not callers.dispatched(first, due, case.source)
        return paths.conditions_between(first, due, case.source) if elsewhere else []
    as_often = partial(_as_often, case, *both)
    rank, other = both
    stays = case.states[rank].step <= case.states[other].step and _again(case, other, rank)
    alone = case.here.get(rank) not in case.states[other].sites
    pair = paths.Pair(_ahead(case, rank, other), as_often, again=_again(case, rank, other), stays=stays, alone=alone)
    return paths.conditions_between(first, second, case.source, pair)


def met_in(case: Case, rank: int, other: int) -> Site | None:
    """Return the rank's own line in which its calls have met equal ones, or the other ends of its messages, in the line of another rank:
    roles have their own lines."""
    group, seq, there = case.wait.group, case.wait.seq, case.here.get(other)
    if (call := case.wait.calls.get(rank)) is not None and call.p2p and call.peer == other:
        ends = ((c, messages.other_end(case.states[other], rank, c, c.nth)) for c in case.states[rank].calls if c.p2p)
        both = ((c.site, end.site) for c, end in ends if end is not None and (c.peer, c.nth) != (other, call.nth))
        met = [mine for mine, theirs in both if mine is not None and theirs is not None and theirs.key == there]
        return min(met, key=lambda site: site.key != case.here.get(rank), default=None)
    if case.wait.p2p or seq is None or there is None or there in case.states[rank].sites:
        return None

    def known(q: int) -> Iterator[tuple[tuple, Site]]:
        for c in case.states[q].calls:
            if c.group == group and not c.p2p and c.seq != seq and c.site is not None:
                yield (c.seq, compatible.op_name(c.op), compatible.elements(c)), c.site

    theirs = {call for call, site in known(other) if site.key == there}
    return next((site for call, site in known(rank) if call in theirs), None)


def _ahead(case: Case, rank: int, other: int) -> bool:
    """True if both ranks are in one round: they made the same call last, and `rank` not yet the other's.

    A rank that has ended a step since that call is a round further.
    """
    state, there, site = case.states[rank], case.here.get(other), _call_before(case, rank, other)
    if site is None or there is None or there == site or case.states[other].step > state.step:
        return False
    return state.sites.get(site, 0) > state.sites.get(there, 0) > 0


def _again(case: Case, rank: int, other: int) -> bool:
    """True if both ranks made the call before at the place where the other is now, from the same callers: it makes it once more.

    If the other has ended a step since then, it is there anew.
    """
    here, state, before = case.wait.calls[other].site, case.states[other], case.call_before(case.wait, other)
    if here is None or _call_before(case, rank, other) != here.key:
        return False
    ended_s = state.steps[-1].end_s if state.steps else None
    return before is None or before.entered_s is None or ended_s is None or before.entered_s > ended_s


def _call_before(case: Case, rank: int, other: int) -> str | None:
    """Return the site at which both ranks made the call before this one; None if it is not one site."""
    sites = {site_of(None, case.call_before(case.wait, q)) for q in (rank, other)}
    return sites.pop() if len(sites) == 1 else None


def _as_often(case: Case, rank: int, other: int, file: str, loop: ast.AST) -> bool:
    """True if a rank has made each call in the body of a loop at least as often as another rank that is still in it.

    Only calls above that rank's place count: those below it are still to come in its round.
    """
    if not isinstance(loop, syntax.LOOPS):
        return False
    mine, theirs = case.states[rank].sites, case.states[other].sites
    stack = _stack(case, other)
    here = next((x.line for x in stack if x.file == file and syntax.within(loop, x.line)), 0)

    def above(key: str) -> bool:
        lines = [line for f, line in lines_of(key) if f == file and line < here]
        return any(syntax.within(node, line) for line in lines for node in loop.body)

    keys = list(filter(above, theirs))
    return bool(keys) and all(mine.get(key, 0) >= theirs[key] for key in keys)


def _left_backward(case: Case, ranks: Sequence[int]) -> Testimony | None:
    other = next((rank for rank in sorted(case.wait.calls) if rank in case.states and rank not in ranks), None)
    if other is None or ranks[0] not in case.states or not _ahead(case, ranks[0], other):
        return None
    return backward.left(ranks, _stack(case, ranks[0]), _stack(case, other), case.wait.calls[other], case.source)


def _frames(case: Case, rank: int) -> tuple[Site, ...]:
    state = case.states[rank]
    return callers.call_stack(state.user_stack, state.host_stack, case.source)


def _stack(case: Case, rank: int) -> tuple[Site, ...]:
    """Return the user's frames at the call that a rank is in."""
    state, call = case.states[rank], case.wait.calls.get(rank)
    site = call.site if call is not None else None
    sampled = site is None or [(f.file, f.line) for f in state.user_stack[: len(site.path)]] == lines_of(site.key)
    if site is None or (sampled and not callers.torn(state.user_stack, case.source)):
        return _frames(case, rank)
    return callers.with_callers((*site.path, *state.user_stack[len(site.path) :]), case.source)
