"""A rank that waits for a queue which, as far as the source shows, only the ranks that wait for it fill: a cycle that no collective shows."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.guards import Guard, GuardKind, on_stack
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
    name = _waited_for(late, source)
    if not name or next(_puts(name, late.user_stack, source), None) is not None:
        return None
    found = {r.rank: site for r in waiting if (site := next(_puts(name, r.user_stack, source), None)) is not None}
    if not found:
        return None
    put = found[min(found)]
    guards = (x for x in reversed(on_stack((put,), source)) if x.kind in (GuardKind.PASSED, GuardKind.HOLDS))
    past = next((guard for guard in guards if guard.test is not None), None)
    return Filled(name, sorted(found), put, *((past.text, past.place) if past is not None else ("", None)))


def filled_elsewhere(late: RankState, source: Source) -> tuple[Site, Guard | None] | None:
    """Return (the line of the file that fills the queue which a rank waits for, a handler around it that ends it quietly); None if
    the rank itself fills it, or no one line does. In a thread that has ended so nothing fills it any more."""
    name, site = _waited_for(late, source), late.current_site
    tree = syntax.tree_of(site.file, source) if site is not None else None
    if site is None or tree is None or not name or next(_puts(name, late.user_stack, source), None) is not None:
        return None
    lines = [at for at, of in _calls(tree, _PUTS) if syntax.name_of(of) == name]
    functions = {f for at in lines if (f := syntax.function(tree, at)) is not None}
    if len(functions) != 1:
        return None
    put = Site(site.file, lines[0], functions.pop().name)
    return put, next((x for x in on_stack((put,), source) if isinstance(x.node, ast.ExceptHandler)), None)


def _waited_for(late: RankState, source: Source) -> str:
    """Return the name of the queue that a rank takes from; empty if its line takes from none, or from several."""
    gets = [of for _, of in _calls(syntax.statement_at(late.current_site, source), _GETS)]
    return syntax.name_of(gets[0]) if len(gets) == 1 else ""


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
