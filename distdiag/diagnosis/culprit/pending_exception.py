"""Evidence from exceptions: a rank is at its call because it handles an exception that the other ranks do not have.

A barrier, a save or a report in `finally:` or `except:` is a collective that only the rank with the exception enters. Its
traceback is not printed until that collective is over, which it never is.
"""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.diagnosis.consequences import is_echo
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import RankState
from distdiag.diagnosis.text.phrases import at, shortened

SHOWN = 160  # characters of the exception
CONTROL_FLOW = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit", "Empty", "Full", "BlockingIOError"})


def accuse(case: Case) -> Testimony | None:
    """Accuse the side whose ranks all handle an exception; nobody if a rank of another side handles one, too."""
    odd = [side for side in case.sides if any(_handles(case, q) for q in side)]
    return explain(case, odd[0]) if len(odd) == 1 and all(_handles(case, q) for q in odd[0]) else None


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
