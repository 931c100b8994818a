"""Witness and explanation by exceptions: a rank is at its call because it handles an exception that the other ranks do not have.

A barrier, a save or a report in `finally:` or `except:` is a collective that only the rank with the exception enters. Its
traceback is not printed until that collective is over, which it never is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.endings import is_echo
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import RankState
from distdiag.diagnosis.text.phrases import at, shortened

SHOWN = 160  # characters of the exception
CONTROL_FLOW = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit", "Empty", "Full", "BlockingIOError"})


def of(states: Mapping[int, RankState], ranks: Collection[int], others: Collection[int]) -> RankState | None:
    """Return the first of `ranks` that handles an exception; None if one of `others` handles the same one."""
    found = [states[q] for q in sorted(ranks) if q in states and _own(states[q])]
    theirs = {name(states[q]) for q in others if q in states and _own(states[q])}
    return next((state for state in found if name(state) not in theirs), None)


def side_with_exception(states: Mapping[int, RankState], sides: Collection[Collection[int]]) -> tuple[int, ...]:
    """Return the side whose ranks all handle an exception of their own; no ranks if one of another side handles one, too."""
    odd = [side for side in sides if any(q in states and _own(states[q]) for q in side)]
    if len(odd) != 1 or not all(q in states and _own(states[q]) for q in odd[0]):
        return ()
    return tuple(sorted(odd[0]))


def name(state: RankState) -> str:
    """Return `KeyError` of a rank that handles "KeyError: 'device'"."""
    return (state.handling or "").split(":", 1)[0]


def _own(state: RankState) -> bool:
    """True if it handles an error that another rank's end has not caused."""
    return bool(state.handling) and name(state) not in CONTROL_FLOW and not is_echo(state.handling or "")


def handled(state: RankState) -> str:
    """Return `KeyError: 'device', raised at read.py:27 in batch`."""
    return f"{shortened(state.handling or '', SHOWN)}, raised{at(state.handling_site)}"


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the evidence that one of these ranks handles an exception which the others do not have; None if none does."""
    state = of(case.states, ranks, (case.incident.victims | set(case.compared)) - set(ranks))
    if state is None:
        return None
    return Testimony(
        name=Reason.EXCEPTION,
        ranks=tuple(ranks),
        text=f"; rank {state.rank} is handling {handled(state)}",
        advice=f"fix the {name(state)}{at(state.handling_site)}; and make no collective call in `finally` or "
        f"`except` that the other ranks do not make: let the exception end {rank_list(ranks)}, or let all ranks "
        "agree on the failure first (all_reduce a flag)",
    )
