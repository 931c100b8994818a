"""The other end of a queue that a rank waits for, as far as the source shows: ranks that wait for it in turn, a cycle that no collective shows; or a
thread or process that an exception may have ended."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.guards import Guard, GuardKind, exits, on_stack
from distdiag.diagnosis.model.snapshot import RankState, Site
from distdiag.diagnosis.model.syntax import Source

_GETS, _PUTS = {"get", "get_nowait"}, {"put", "put_nowait"}


class Filled(NamedTuple):
    """Who fills a queue, where, and the condition that leads past that line, if there is one."""

    name: str
    ranks: list[int]
    put: Site
    condition: str
    condition_at: Site | None


def filled_by(late: RankState, waiting: Iterable[RankState], source: Source) -> Filled | None:
    """Return who fills the queue that a rank waits for: ranks that are in a function with `NAME.put(…)`; None if it fills it itself."""
    name, other = _waited_for(late, source)
    if not name or other is not _PUTS or next(_ends(name, other, late.user_stack, source), None) is not None:
        return None
    found = {r.rank: x for r in waiting if (x := next(_ends(name, other, r.user_stack, source), None)) is not None}
    if not found:
        return None
    put = found[min(found)]
    guards = (x for x in reversed(on_stack((put,), source)) if x.kind in (GuardKind.PASSED, GuardKind.HOLDS))
    past = next((guard for guard in guards if guard.test is not None), None)
    return Filled(name, sorted(found), put, *((past.text, past.place) if past is not None else ("", None)))


class OtherEnd(NamedTuple):
    """What fills or empties a queue: where, and a handler around that line by which an exception ends it quietly."""

    fills: bool
    site: Site
    quiet: Guard | None


def other_end(late: RankState, source: Source) -> OtherEnd | None:
    """Return the other end of the queue that a rank waits for; None if the rank itself is that, too, or no one function of the file."""
    (name, other), site = _waited_for(late, source), late.current_site
    tree = syntax.tree_of(site.file, source) if site is not None else None
    if site is None or tree is None or not name or next(_ends(name, other, late.user_stack, source), None) is not None:
        return None
    lines = [at for at, of in _calls(tree, other) if syntax.name_of(of) == name]
    functions = {f for at in lines if (f := syntax.function(tree, at)) is not None}
    if len(functions) != 1:
        return None
    end = Site(site.file, lines[0], functions.pop().name)
    return OtherEnd(other is _PUTS, end, _quiet(end, source))


def _quiet(end: Site, source: Source) -> Guard | None:
    """Return the handler that ends the function of a line without an error; one in a loop that goes on does not."""
    in_loop = False
    for guard in on_stack((end,), source):
        in_loop |= guard.kind is GuardKind.INSIDE
        if not isinstance(guard.node, ast.ExceptHandler) or guard.kind is not GuardKind.PASSED:
            continue
        if not in_loop or any(isinstance(x, (ast.Break, ast.Return)) for x, _ in exits(guard.node.body)):
            return guard
    return None


def _waited_for(late: RankState, source: Source) -> tuple[str, set[str]]:
    """Return (the name of the queue that a rank takes from, or puts into; methods of its other end); an empty name if its line uses none,
    or several."""
    statement = syntax.statement_at(late.current_site, source)
    for own, other in (({"get"}, _PUTS), ({"put"}, _GETS)):
        if found := [of for _, of in _calls(statement, own)]:
            return syntax.name_of(found[0]) if len(found) == 1 else "", other
    return "", set()


def _ends(name: str, methods: set[str], stack: Sequence[Site], source: Source) -> Iterator[Site]:
    """Yield the lines that call one of these methods of a queue, in the functions of a stack."""
    for frame in stack:
        tree = syntax.tree_of(frame.file, source)
        function = syntax.function(tree, frame.line) if tree is not None else None
        for at, of in _calls(function, methods):
            if function is not None and syntax.name_of(of) == name:
                yield Site(frame.file, at, function.name)


def _calls(node: ast.AST | None, names: set[str]) -> Iterator[tuple[int, ast.expr]]:
    """Yield (line, object) of each call of a method with one of these names."""
    for x in ast.walk(node) if node is not None else ():
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr in names:
            yield x.lineno, x.func.value
