"""A rank that waits for a queue which, as far as the source shows, only the ranks that wait for it fill: a cycle that no collective shows."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.guards import GuardKind, on_stack
from distdiag.diagnosis.model.snapshot import RankState, Site
from distdiag.diagnosis.model.syntax import Source

_GETS, _PUTS = {"get"}, {"put", "put_nowait"}


class Filled(NamedTuple):
    """Who fills a queue, where, and the condition that leads past that line, if there is one."""

    name: str
    ranks: list[int]
    put: Site
    condition: str
    condition_at: Site | None


def filled_by(late: RankState, waiting: Iterable[RankState], source: Source) -> Filled | None:
    """Return who fills the queue that a rank waits for: ranks that are in a function with `NAME.put(…)`; None if it fills it itself."""
    line = syntax.statement_at(late.current_site, source)
    gets = [of for _, of in _calls(line, _GETS)]
    name = syntax.name_of(gets[0]) if len(gets) == 1 else ""
    if not name or next(_puts(name, late.user_stack, source), None) is not None:
        return None
    found = {r.rank: site for r in waiting if (site := next(_puts(name, r.user_stack, source), None)) is not None}
    if not found:
        return None
    put = found[min(found)]
    guards = (x for x in reversed(on_stack((put,), source)) if x.kind in (GuardKind.PASSED, GuardKind.HOLDS))
    past = next((guard for guard in guards if guard.test is not None), None)
    return Filled(name, sorted(found), put, *((past.text, past.place) if past is not None else ("", None)))


def _puts(name: str, stack: Sequence[Site], source: Source) -> Iterator[Site]:
    """Yield the lines that put something into a queue, in the functions of a stack."""
    for frame in stack:
        tree = syntax.tree_of(frame.file, source)
        function = syntax.function(tree, frame.line) if tree is not None else None
        for at, of in _calls(function, _PUTS):
            if function is not None and syntax.name_of(of) == name:
                yield Site(frame.file, at, function.name)


def _calls(node: ast.AST | None, names: set[str]) -> Iterator[tuple[int, ast.expr]]:
    """Yield (line, object) of each call of a method with one of these names."""
    for x in ast.walk(node) if node is not None else ():
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr in names:
            yield x.lineno, x.func.value
