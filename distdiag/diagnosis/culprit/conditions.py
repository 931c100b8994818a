"""Evidence from the source: a condition on the rank that leads to one side's call, and conditions on data at which ranks part."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distdiag.diagnosis.culprit import paths, rank_condition
from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.culprit.rank_condition import Condition, Source
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState, Site
from distdiag.diagnosis.text.incident import implicit_text, verb
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits import compatible, messages


def on_rank(case: Case) -> tuple[tuple[int, ...], Condition] | None:
    """Return (ranks that a condition on the rank names, condition) if exactly one of two sides is under one."""
    wait, source = case.wait, case.source
    if source is None or len(wait.sides) != 2 or not all(min(side) in case.states for side in wait.sides):
        return None
    stacks = [_stack(case.states[rank], wait.calls.get(rank), source) for rank in map(min, wait.sides)]
    found = [rank_condition.around(stacks[i], stacks[1 - i], source) for i in (0, 1)]
    for i, side in enumerate(wait.sides):
        mine, theirs = found[i], found[1 - i]
        if mine is not None and theirs is None:
            return tuple(sorted(wait.sides[1 - i] if mine.names_leaver else side)), mine
    return None


def explain_rank(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the condition on the rank that leads only these ranks to their call, or away from the others'; None if not."""
    found = on_rank(case)
    if found is None or not ranks or found[0] != tuple(ranks):
        return None
    file, line, text, names_leaver = found[1]
    who, own = rank_list(ranks), case.wait.calls[ranks[0]]
    guard, place = f"`{text.removesuffix(':')}`", at(Site(file, line))
    op = f"{compatible.op_name(own.op)}{at(own.site)}"
    if names_leaver:
        other = case.wait.calls[min(next(side for side in case.wait.sides if ranks[0] not in side))]
        left = f"{compatible.op_name(other.op)}{at(other.site)}"
        return Testimony(
            name=Reason.CONDITION,
            ranks=tuple(ranks),
            text=f"; {who} left before {left} due to `{text}`{place}",
            advice=f"make {left} on all ranks or on none: {guard}{place} lets {who} leave before it",
        )
    advice = f"make {op} on all ranks or on none: {guard}{place} keeps it to {who}"
    if implicit_text(case.states.get(ranks[0]), own) and compatible.op_name(own.op) == "broadcast":
        advice = (
            f"on {who} call the module inside DDP (`model.module(...)`{at(own.site)}), which communicates nothing, or let "
            f"all ranks run what {guard}{place} keeps to {who}"
        )
    text = f"; only {who} {verb(ranks, 'runs', 'run')} it due to `{text}`{place}"
    return Testimony(name=Reason.CONDITION, ranks=tuple(ranks), text=text, advice=advice)


def explain_parting(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the conditions that can have led these ranks to another call than the rest; None if there are none."""
    found = _parting(case, ranks) if ranks else _tied(case)
    if not found or on_rank_names(case, ranks):
        return None
    advice = paths.decision_advice(found[0], ranks) if ranks and len(found) == 1 else ""
    if not ranks and len(found) == 1 and _apart(case):
        advice = (
            f"find on which rank `{found[0].text.removesuffix(':')}` at line {found[0].line} had the wrong result, or let "
            "all ranks decide together (all_reduce what it tests)"
        )
    return Testimony(name=Reason.PARTING, ranks=tuple(ranks), text=paths.parting_text(found), advice=advice)


def on_rank_names(case: Case, ranks: Sequence[int]) -> bool:
    """True if a condition on the rank names exactly these ranks: nothing else is to be looked for."""
    found = on_rank(case)
    return bool(ranks) and found is not None and found[0] == tuple(ranks)


def explain_cycle(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the conditions that can have led the first of these ranks past the call that another rank waits for."""
    found = _past_the_call(case, ranks) if ranks else []
    if not found:
        return None
    advice = paths.decision_advice(found[0], ranks) if len(found) == 1 else ""
    return Testimony(name=Reason.PARTING, ranks=tuple(ranks), text=paths.parting_text(found), advice=advice)


def explain_leaving(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the conditions through which a rank that ended normally can have left the loop that another rank is in."""
    wait = next((w for w in case.waits if not w.p2p), None)
    waiting = [rank for rank in wait.ranks if case.states[rank].user_stack] if wait is not None else []
    if case.source is None or not waiting or not case.ended:
        return None
    site = case.states[case.ended[0]].current_site
    found = paths.leaving(site, case.states[waiting[0]].user_stack, case.source)
    return Testimony(name=Reason.PARTING, ranks=tuple(ranks), text=paths.parting_text(found)) if found else None


def parted_text(case: Case) -> str:
    """Return where the paths of two sides diverge, if neither is known to be wrong; empty if that is not known."""
    return paths.parting_text(_tied(case))


def _apart(case: Case) -> bool:
    first, second = (case.wait.calls[min(side)].site for side in case.wait.sides[:2])
    return first is not None and second is not None and first.key != second.key


def _tied(case: Case) -> list[Condition]:
    found = [condition for side in case.wait.sides[:2] for condition in _parting(case, side)]
    return list(dict.fromkeys(found))[-paths.SHOWN :]


def _parting(case: Case, ranks: Collection[int]) -> list[Condition]:
    known = [rank for rank in sorted(case.wait.calls) if rank in case.states]
    mine, others = [q for q in known if q in ranks], [q for q in known if q not in ranks]
    if case.source is None or not mine or not others:
        return []
    stacks = [_stack(case.states[rank], case.wait.calls.get(rank), case.source) for rank in (mine[0], others[0])]
    return paths.parting(stacks[0], stacks[1], case.source)


def _stack(state: RankState, call: Call | None, source: Source) -> tuple[Site, ...]:
    site = call.site if call is not None else None
    if site is None or state.user_stack[:1] == (site,):
        return paths.call_stack(state.user_stack, state.host_stack, source)
    return paths.with_callers((site, *state.user_stack[1:]), source)


def _past_the_call(case: Case, ranks: Sequence[int]) -> list[Condition]:
    state, main, source, states = case.states.get(ranks[0]), case.main(ranks), case.source, case.states
    if source is None or state is None or not main.ranks:
        return []
    stack = paths.call_stack(state.user_stack, state.host_stack, source)
    if not main.p2p:
        site = next((call.site for rank in main.ranks if (call := main.calls.get(rank)) is not None), None)
        victims = sorted(case.incident.victims - set(ranks))
        there = [q for q in victims if (call := states[q].blocked) is not None and call.site == site]
        waiting = {
            q: paths.call_stack(states[q].user_stack, states[q].host_stack, source)
            for q in [*main.ranks, *there][: paths.COMPARED]
            if q in states
        }
        return paths.parting(stack, waiting[paths.nearest(stack, waiting, source)], source) if waiting else []
    # the site of its newest message of this kind, if that is in a function on its stack
    wanted = messages.OPPOSITE[main.key[2]]
    earlier = (
        call.site
        for call in reversed(state.calls)
        if call.p2p
        and call.peer == main.ranks[0]
        and call.group == main.group
        and messages.direction_of(call) == wanted
    )
    site = next((x for x in earlier if x is not None), None)
    here = [i for i, x in enumerate(stack) if site and (x.file, x.function) == (site.file, site.function)]
    return paths.parting(stack[: here[0] + 1], (site,), source) if site is not None and here else []
