"""Evidence from exceptions: a rank is at its call because it handles an exception that the other ranks do not have.

A barrier, a save or a report in `finally:` or `except:` is a collective that only the rank with the exception enters. Its
traceback is not printed until that collective is over, which it never is. Or a collective raised on some ranks, which caught that: the others
are then in another call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distdiag.diagnosis.consequences import is_echo, is_timeout
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.culprit.paths import CONTROL_FLOW
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.conditions import handler_advice
from distdiag.diagnosis.text.phrases import at, op_at, shortened
from distdiag.diagnosis.waits.wait import call_at, last_wait
from distdiag.terms.units import rough_duration

SHOWN = 160  # characters of the exception


def accuse(case: Case) -> Testimony | None:
    """Accuse the side whose ranks all handle an exception; nobody if a rank of another side handles one, too."""
    return explain(case, odd) if (odd := _only_side(case, lambda q: _handles(case, q))) else None


def went_on(case: Case) -> Testimony | None:
    """Accuse the side whose ranks have all caught an error just before their call, however many they are: what they do now no other does."""
    if not (odd := _only_side(case, lambda q: bool(just_caught(case.states.get(q))))):
        return None
    who, what = rank_list(odd), just_caught(case.states[odd[0]])
    return Testimony(ranks=tuple(odd), text=f"; before that, {who} caught {what}", advice=handler_advice(who, what))


def _only_side(case: Case, holds: Callable[[int], bool]) -> Sequence[int]:
    """Return the side of which something holds for all ranks, and for no rank of another side; empty if there is none."""
    odd = [side for side in case.sides if any(map(holds, side))]
    return odd[0] if len(odd) == 1 and all(map(holds, odd[0])) else ()


def just_caught(state: RankState | None) -> str:
    """Return the error out of torch that a rank has caught since its newest step and call before the one it is in; empty without one, or
    if another rank's end has caused it."""
    call = last_wait(state) if state is not None else None
    if state is None or call is None or not state.caught or is_echo(state.caught):
        return ""
    done = [c.entered_s for c in state.calls if c.entered_s is not None and c.completed_s is not None]
    since_s = max([0.0, *done[-1:], *(step.end_s for step in state.steps[-1:])])
    return shortened(state.caught, SHOWN) if since_s < (state.caught_s or 0.0) < (call.entered_s or 0.0) else ""


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the evidence that one of these ranks handles an exception which the others do not have; None if none does."""
    others = (case.incident.victims | set(case.compared)) - set(ranks)
    theirs = {name(case.states[q]) for q in others if _handles(case, q)}
    own = (case.states[q] for q in sorted(ranks) if _handles(case, q))
    state = next((state for state in own if name(state) not in theirs), None)
    if state is None:
        return None
    return Testimony(
        ranks=tuple(ranks),
        head=f"rank {state.rank} is handling {handled(state)}",
        advice=f"fix the {name(state)}{at(state.handling_site)}; and make no collective call in `finally` or "
        f"`except` that the other ranks do not make: let the exception end {rank_list(ranks)}, or let all ranks "
        "agree on the failure first (all_reduce a flag)",
    )


def swallowed(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the collective that raised on some ranks, just before the calls they are in now, and whether the others were late for it."""
    failed = {q: call for q in case.compared if (call := _raised(case.states.get(q))) is not None}
    first = min(failed, key=lambda q: case.states[q].caught_s or 0.0, default=None)
    if first is None:
        return None
    call, state = failed[first], case.states[first]
    failed = {q: c for q, c in failed.items() if (c.group, c.seq) == (call.group, call.seq)}
    rest = [q for q in case.compared if q not in failed]
    caught_s, entered_s = state.caught_s or 0.0, call.entered_s or 0.0
    how = "timed out" if is_timeout(state.caught or "") else f"raised {shortened(state.caught or '', SHOWN)}"
    theirs = (call_at(case.states[q], call.group, call.seq or 0) for q in rest)
    came = [c.entered_s if c is not None else None for c in theirs]
    late, advice = "", ""
    if rest and all(t is None or t > caught_s for t in came):
        by = [f", {rough_duration(t - entered_s)} late" for t in came if t is not None]
        late = f", before {rank_list(rest)} came there{''.join(by[:1])}"
        advice = f"see what made {rank_list(rest)} late for {op_at(call)}, and "
    return Testimony(
        ranks=tuple(ranks),
        text=f"; before that, {op_at(call)} {how} on {rank_list([first])} after {rough_duration(caught_s - entered_s)}{late}; "
        f"{rank_list(failed)} went on without it",
        advice=f"{advice}let an error of a collective end the rank, or let all ranks agree on it (all_reduce a flag in another group): {rank_list(failed)} "
        "caught it and went on alone",
    )  # fmt: skip


def _raised(state: RankState | None) -> Call | None:
    """Return the collective that raised in a rank, which has completed none since, and waits in another one."""
    if state is None or state.caught_s is None or state.blocked is None:
        return None
    newest = next((c for c in reversed(state.calls) if c.failed or c.completed_s is not None), None)
    if newest is None or not newest.failed or newest.p2p or newest.other_thread or newest.entered_s is None:
        return None
    return newest if newest.entered_s < state.caught_s else None


def name(state: RankState) -> str:
    """Return `KeyError` of a rank that handles "KeyError: 'device'"."""
    return (state.handling or "").split(":", 1)[0]


def _handles(case: Case, rank: int) -> bool:
    """True if a rank handles an error that another rank's end has not caused."""
    state = case.states.get(rank)
    if state is None or not state.handling:
        return False
    return name(state) not in CONTROL_FLOW and not is_echo(state.handling)


def handled(state: RankState) -> str:
    """Return `KeyError: 'device', raised at read.py:27 in batch`."""
    return f"{shortened(state.handling or '', SHOWN)}, raised{at(state.handling_site)}"
