"""What a rank's other threads do: a collective that one of them is in, an exception that ended one, and the other end of a queue that it waits for.

Nothing else shows a dead thread: its traceback is printed among thousands of lines, and the rank goes on. A queue may be filled by ranks that wait
for this one in turn, a cycle that no collective shows; or by a thread or process that an exception may have ended.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from distdiag.diagnosis.culprit import paths
from distdiag.diagnosis.culprit.paths import Condition
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.guards import Guard, GuardKind, exits, on_stack
from distdiag.diagnosis.model.snapshot import Call, RankState, Site
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.text.phrases import at, shortened
from distdiag.diagnosis.waits.wait import call_at

SHOWN = 160  # characters of the exception
_GETS, _PUTS = {"get", "get_nowait"}, {"put", "put_nowait"}


class Open(NamedTuple):
    """A collective that a rank issued without waiting in it, mostly in another thread, and that does not complete."""

    call: Call
    missing: tuple[int, ...]  # members that have not issued it
    alone: Condition | None  # the condition that keeps the rank's call to it


def left_open(facts: Facts, r: RankState) -> Open | None:
    """Return the open collective of a rank whose host is elsewhere."""
    s = facts.snapshot
    for name, issued in r.enqueued.items():
        done, group = r.completed.get(name, issued), s.groups.get(name)
        if done >= issued or group is None:
            continue
        missing = tuple(q for q in group.ranks if q in s.ranks and s.ranks[q].enqueued.get(name, 0) <= done)
        if missing:
            call = call_at(r, name, done + 1) or Call(op="", group=name, seq=done + 1)
            guard = paths.rank_condition(r.user_stack, s.ranks[missing[0]].user_stack, facts.source)
            return Open(call, missing, guard if guard is not None and guard.way is paths.Way.ALONE else None)
    return None


def ended_thread(states: Iterable[RankState]) -> str:
    """Return `a thread of rank 2 had ended by OSError: …, raised at a.py:7; `, the newest of these ranks; empty if none had."""
    found = [(x.t_s or 0.0, r.rank, x) for r in states for x in r.samples if x.kind == "thread_ended"]
    if not found:
        return ""
    _, rank, sample = max(found, key=lambda item: item[:2])
    return f"a thread of rank {rank} had ended by {shortened(sample.name, SHOWN)}, raised{at(sample.site)}; "


# -- queues -------------------------------------------------------------------------------------------------------------


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
    lines = [line for line, of in _calls(tree, other) if syntax.name_of(of) == name]
    functions = {f for line in lines if (f := syntax.function(tree, line)) is not None}
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
        for line, of in _calls(function, methods):
            if function is not None and syntax.name_of(of) == name:
                yield Site(frame.file, line, function.name)


def _calls(node: ast.AST | None, names: set[str]) -> Iterator[tuple[int, ast.expr]]:
    """Yield (line, object) of each call of a method with one of these names."""
    for x in ast.walk(node) if node is not None else ():
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr in names:
            yield x.lineno, x.func.value
