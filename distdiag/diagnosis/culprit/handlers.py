"""Evidence from handlers of signals: a rank makes its call in one, between two instructions of whatever it was doing."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.model.syntax import Source, name_of, statement_at, tree_of
from distdiag.diagnosis.text.phrases import site_text


class Handler(NamedTuple):
    """A frame of a handler, the line of `signal.signal(…)` that names it, and the line at which the signal arrived."""

    site: Site
    set_at: Site
    arrived: Site


def accuse(case: Case) -> Testimony | None:
    """Accuse the side whose ranks all make their call in a handler of a signal; nobody if a rank of another side does, too."""
    within = {q: handler for q in case.compared if (handler := _of(case, q)) is not None}
    ranks = next((side for side in case.sides if within.keys() == {*side}), None)
    if ranks is None:
        return None
    who, found = rank_list(ranks), within[ranks[0]]
    name = found.site.function
    return Testimony(
        ranks=tuple(ranks),
        head=f"{who} made {'its' if len(ranks) == 1 else 'their'} call in `{name}`, a handler of a signal "
        f"(set at {site_text(found.set_at)})",
        text=f"; the signal arrived at {site_text(found.arrived)}",
        advice=f"make no collective call in a handler: the signal arrives at another line on each rank, or on some ranks only; let `{name}` only set "
        "a flag, let all ranks agree on it at the end of a step (all_reduce with MAX), and make the call there",
    )


def _of(case: Case, rank: int) -> Handler | None:
    state = case.states.get(rank)
    call = state.blocked or case.wait.calls.get(rank) if state is not None else None
    if state is None or call is None or call.site is None or not state.user_stack:
        return None
    first = state.user_stack[0]
    at_call = (first.file, first.line) == (call.site.file, call.site.line)
    return handler(state.user_stack, case.source) if at_call else None


def handler(stack: Sequence[Site], source: Source) -> Handler | None:
    """Return the handler of a signal that a stack, innermost first, is in.

    Its name is given to `signal.signal` in the file of one of the frames, and the line around its frame does not call that name.
    """
    for site, outer in itertools.pairwise(stack):
        around = statement_at(outer, source)
        if around is None or any(name_of(x.func) == site.function for x in ast.walk(around) if isinstance(x, ast.Call)):
            continue
        for file in dict.fromkeys(x.file for x in stack):
            line = _set_at(file, site.function, source)
            if line:
                return Handler(site, Site(file, line), outer)
    return None


def _set_at(file: str, name: str, source: Source) -> int:
    """Return the line of a file that sets the function of this name as the handler of a signal; 0 if there is none."""
    tree = tree_of(file, source)
    calls = (x for x in ast.walk(tree) if isinstance(x, ast.Call)) if tree is not None else ()
    found = (x.lineno for x in calls if name_of(x.func) == "signal" and len(x.args) == 2 and name_of(x.args[1]) == name)
    return next(found, 0)
