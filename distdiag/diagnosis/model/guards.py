"""Reads from a source which conditions decide whether a line runs: its guards (control dependence on the syntax tree).

A guard is a statement or expression and the branch of it that the line needs, in program order from the start
of the function: the `if` around the line, an earlier `if` whose arm leaves (`return`, `continue`, `break`,
`raise`, `sys.exit`), a loop that it is in or that must have ended, an exception that must not have been
raised, a decorator. Nothing is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.rank_tests import can_differ, reads_rank
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.model.syntax import (
    FUNCTIONS,
    LOOPS,
    SCOPES,
    Source,
    Step,
    code_of_line,
    exits_process,
    name_of,
    parsed,
    tree_of,
    way,
)

_EXITS = (ast.Return, ast.Break, ast.Continue, ast.Raise)
# functions whose result has no graph
_NEW_TENSORS = {
    "zeros", "ones", "full", "empty", "tensor", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "detach",
}  # fmt: skip
# what logging calls for a message's arguments only if the message passes the logger's level
_FORMATS = {"__str__", "__repr__", "__format__"}
_LOGS = re.compile(r"[\w.()\[\]\"']+\.(debug|info|warning|error|critical|exception|log)\(")
_CACHES = re.compile(r"@[\w.]*(cache|memo)", re.IGNORECASE)
_Node = ast.stmt | ast.expr | ast.ExceptHandler | ast.match_case


class GuardKind(Enum):
    """How a guard decides about the line."""

    HOLDS = auto()  # the line is in this branch
    PASSED = auto()  # the line runs only if this branch, which leaves before it, was not taken
    INSIDE = auto()  # the line is in this loop
    ENDED = auto()  # the line runs only after this loop has ended


class Guard(NamedTuple):
    """One condition of a line.

    Attributes:
        node: The `if`, loop, handler, case, `with`, conditional expression or decorator.
        branch: The branch that the line is in, or that leaves before it: "body" or "orelse".
        test: What is tested; None for an exception.
        way_out: The statement that leaves in the branch of a PASSED guard; None if an exception skips the
            rest of a block.
        upto: For an exception that skips the rest of a `try` or `with`: the line that it skips, else 0.
    """

    kind: GuardKind
    node: _Node
    branch: str = "body"
    test: ast.expr | None = None
    way_out: ast.stmt | None = None
    upto: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """What it has in common with the same guard of another line."""
        start = self.node.pattern if isinstance(self.node, ast.match_case) else self.node
        return self.kind, self.branch, type(self.node), start.lineno, start.col_offset

    @property
    def line(self) -> int:
        """Line of the condition's text."""
        return self.node.pattern.lineno if isinstance(self.node, ast.match_case) else self.node.lineno


def exits(block: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, Guard | None]]:
    """Yield the statements that leave a block, in program order, each with its guard; None if it always leaves.

    A `break` or `continue` leaves only a loop around the block.
    """
    for node, guard, in_loop in _nested(block):
        leaves = isinstance(node, _EXITS) and not (in_loop and isinstance(node, (ast.Break, ast.Continue)))
        if isinstance(node, ast.stmt) and (leaves or exits_process(node)):
            yield node, guard._replace(way_out=node) if guard is not None else None


def _nested(block: Sequence[ast.stmt]) -> Iterator[tuple[ast.AST, Guard | None, bool]]:
    """Yield the statements in a block and in blocks inside it, in program order: each with the condition that it is under, and whether
    an inner loop is around it."""
    todo: list[tuple[ast.AST, Guard | None, bool]] = [(node, None, False) for node in reversed(block)]
    while todo:
        yield (about := todo.pop())
        (node, around, looping), inner = about, []
        for field in ("body", "handlers", "orelse", "finalbody", "cases") if not isinstance(node, SCOPES) else ():
            in_loop = looping or (isinstance(node, LOOPS) and field == "body")
            for child in getattr(node, field, ()):
                guard = around
                if isinstance(node, ast.If) and not _asks_about(around, node.test):
                    guard = Guard(GuardKind.PASSED, node, field, node.test)
                elif isinstance(child, ast.ExceptHandler):
                    guard = Guard(GuardKind.PASSED, child)
                elif isinstance(child, ast.match_case) and isinstance(node, ast.Match):
                    guard = Guard(GuardKind.PASSED, child, test=node.subject)
                inner.append((child, guard, in_loop))
        todo += reversed(inner)


def _asks_about(handler: Guard | None, test: ast.expr | None) -> bool:
    """True for a test of the exception that this handler caught: a rank without that exception does not evaluate it."""
    node = handler.node if handler is not None else None
    if not isinstance(node, ast.ExceptHandler) or node.name is None or test is None:
        return False
    return any(isinstance(x, ast.Name) and x.id == node.name for x in ast.walk(test))


def text_of(guard: Guard, text: str) -> str:
    """Return a condition as in the program: a statement's line without its colon, or what an expression tests."""
    node, test = guard.node, guard.test
    if isinstance(node, ast.BoolOp) and test is not None:
        return f"{ast.get_source_segment(text, test)} {'and' if isinstance(node.op, ast.And) else 'or'} …"
    if isinstance(node, (ast.expr, ast.With, ast.AsyncWith)) and test is not None and test is not node:
        return f"if {ast.get_source_segment(text, test)}"
    return code_of_line(text, guard.line).removesuffix(":")


@lru_cache(512)
def guards(tree: ast.Module, line: int, callee: str = "") -> tuple[Guard, ...]:
    """Return the guards of a line in program order from the start of its function; of the module if it is in none.

    Args:
        callee: Name of the function that the line calls, if known: which part of an expression runs.
    """
    out: list[Guard] = []
    node: ast.stmt | None = None
    for step in way(tree, line):
        out += (guard for guard in _around(step, line) if not any(_asks_about(x, guard.test) for x in out))
        if step.field not in ("handlers", "cases"):
            for earlier in step.block[: step.at]:
                out += (guard for _, guard in exits([earlier]) if guard is not None)
                out += (_loop(GuardKind.ENDED, inner) for inner, _, _ in _nested([earlier]) if isinstance(inner, LOOPS))
        node = step.node
        if isinstance(node, SCOPES):  # a condition around a function's definition does not apply to its calls
            out = [Guard(GuardKind.HOLDS, x, "decorator", x) for x in node.decorator_list]
    if isinstance(node, LOOPS) and line < node.body[0].lineno:
        out.append(_loop(GuardKind.INSIDE, node))
    if node is not None and not isinstance(node, SCOPES):
        out += _in_expression(node, callee)
    return tuple(out)


def along(stack: Sequence[Site], source: Source) -> Iterator[tuple[Site, str, Guard]]:
    """Yield (site, text of its file, guard) of all guards of the calls on a stack, which is innermost first."""
    for i, site in enumerate(stack):
        tree, callee = tree_of(site.file, source), stack[i - 1].function if i else ""
        for guard in guards(tree, site.line, callee) if tree is not None else ():
            yield site, source(site.file) or "", guard


def _loop(kind: GuardKind, node: ast.For | ast.AsyncFor | ast.While) -> Guard:
    return Guard(kind, node, test=node.test if isinstance(node, ast.While) else node.iter)


def _around(step: Step, line: int) -> Iterator[Guard]:
    """Yield what the statement around a block lets it run by."""
    owner = step.owner
    match owner:
        case ast.If() if line > (owner.test.end_lineno or 0) or not _calls_other(owner.test):
            yield Guard(GuardKind.HOLDS, owner, step.field, owner.test)
        case ast.For() | ast.AsyncFor() | ast.While():
            yield _loop(GuardKind.INSIDE if step.field == "body" else GuardKind.ENDED, owner)
        case ast.Try() if step.field in ("body", "orelse"):
            for handler in owner.handlers:
                if not isinstance(handler.body[-1], ast.Raise) and not exits_process(handler.body[-1]):
                    yield Guard(GuardKind.PASSED, handler, upto=line)
        case ast.With() | ast.AsyncWith() if any(_called_in(x.context_expr) & {"suppress"} for x in owner.items):
            yield Guard(GuardKind.PASSED, owner, upto=line)
        case ast.With() | ast.AsyncWith():
            for part in (x for item in owner.items for x in ast.walk(item.context_expr) if isinstance(x, ast.IfExp)):
                if "no_sync" in _called_in(part.body) ^ _called_in(part.orelse):  # DDP exchanges gradients, or does not
                    branch = "orelse" if "no_sync" in _called_in(part.body) else "body"
                    yield Guard(GuardKind.HOLDS, owner, branch, part.test)
        case ast.ExceptHandler():
            yield Guard(GuardKind.HOLDS, owner)
        case ast.Match() if isinstance(case := step.node, ast.match_case):
            yield Guard(GuardKind.HOLDS, case, test=owner.subject)


def _in_expression(node: ast.stmt, callee: str) -> Iterator[Guard]:
    """Yield expressions that call something in one branch: `f() if a else None`, `a and f()`, `[f(x) for … if …]`."""
    own = [x for x in ast.iter_child_nodes(node) if isinstance(x, (ast.expr, ast.withitem))]  # not the blocks inside
    in_all = set().union(*map(_called_in, own))
    for part in (x for child in own for x in ast.walk(child)):
        found: list[tuple[ast.expr, str, list[ast.expr]]] = []
        match part:
            case ast.IfExp():
                found = [(part.test, arm, [getattr(part, arm)]) for arm in ("body", "orelse")]
            case ast.BoolOp():
                found = [(part.values[0], "body", part.values[1:])]
            case ast.Call() if callee in _FORMATS and _LOGS.match(ast.unparse(part)) and not _formats(part):
                yield Guard(GuardKind.HOLDS, part, "body", part)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                found = [(test, "body", _made(part)) for loop in part.generators for test in loop.ifs]
        called = [(test, branch, set().union(*map(_called_in, arm))) for test, branch, arm in found]
        fits = [(test, branch) for test, branch, names in called if (callee in names if callee in in_all else names)]
        if len(fits) == 1:  # if both branches call something, either may be the line's
            ((test, branch),) = fits
            yield Guard(GuardKind.HOLDS, part, branch, test)  # type: ignore[arg-type]


def _made(part: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> list[ast.expr]:
    return [part.key, part.value] if isinstance(part, ast.DictComp) else [part.elt]


def repeats(node: ast.AST, callee: str = "") -> bool:
    """True for a comprehension that calls something of this name in each round; what it goes over is called once."""
    if not isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        return False
    each = [
        *_made(node),
        *(test for loop in node.generators for test in loop.ifs),
        *(x.iter for x in node.generators[1:]),
    ]
    called = set().union(*map(_called_in, each))
    return callee in called if callee in called | _called_in(node) else bool(called)


def _formats(call: ast.Call) -> bool:
    """True if an argument of a call is made into text before the call, so on every rank: `f"{x}"`, `"%s" % x`, `str(x)`."""
    inside = [x for argument in call.args for x in ast.walk(argument)]
    made = any(isinstance(x, ast.JoinedStr) or (isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mod)) for x in inside)
    return made or any(isinstance(x, ast.Call) and name_of(x.func) in ("format", "str", "repr", "join") for x in inside)


def _called_in(node: ast.AST) -> set[str]:
    """Return the names of what is called in an expression."""
    return {name_of(x.func) or "()" for x in ast.walk(node) if isinstance(x, ast.Call)}


def _calls_other(test: ast.expr) -> bool:
    """True if a test calls anything that can differ between ranks and is not the rank: maybe the line's call."""
    return any(isinstance(x, ast.Call) and not reads_rank(x.func) and can_differ(x.func) for x in ast.walk(test))


def other_branch_calls(guard: Guard) -> bool:
    """True if the other branch of an `if` calls something, too: the ranks' branches may belong together."""
    if not isinstance(guard.node, (ast.If, ast.IfExp)):
        return False
    other = getattr(guard.node, "orelse" if guard.branch == "body" else "body")
    return any(map(_called_in, other if isinstance(other, list) else [other]))


_OPPOSITE = {ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.Lt: ast.GtE, ast.Gt: ast.LtE}


def takes_turns(tree: ast.Module, guard: Guard, line: int) -> bool:
    """True if another `if` of the function with the opposite test makes the same call: `main_process_first` has a barrier for either."""
    around, node = syntax.function(tree, line), syntax.statement(tree, line)
    if guard.kind is not GuardKind.HOLDS or not isinstance(guard.node, ast.If) or around is None or node is None:
        return False
    test, called = guard.node.test, _called_in(node)
    tests = (x for x in ast.walk(around) if isinstance(x, ast.If))
    others = (x for x in tests if _negated(x.test) == ast.dump(test) or _negated(test) == ast.dump(x.test))
    return bool(called) and any(called <= _called_in(statement) for x in others for statement in x.body)


def _negated(test: ast.expr) -> str:
    """Return the syntax of the opposite of a test."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.dump(test.operand)
    if isinstance(test, ast.Compare) and (opposite := _OPPOSITE.get(type(test.ops[0]))) and len(test.ops) == 1:
        return ast.dump(ast.Compare(test.left, [opposite()], test.comparators))
    return ast.dump(ast.UnaryOp(ast.Not(), test))


def caches(text: str) -> bool:
    """True for a decorator whose function does not run if its result is known: `@functools.lru_cache(9)`, `@memoize`."""
    return _CACHES.match(text) is not None


def logs(text: str) -> bool:
    """True for a call of a logger: `log.info("%s", meters)` formats its arguments only where the logger's level lets it."""
    return _LOGS.match(text) is not None


def made_anew(text: str) -> Guard | None:
    """Return the `if` under which a function returns a new tensor without a graph, and else a computed one.

    None if there is no such function in the file, or more than one such `if`.
    """
    found = []
    for node in ast.walk(parsed(text) or ast.Module([], [])):
        if isinstance(node, FUNCTIONS):
            ways = [(way_out, guard) for way_out, guard in exits(node.body) if isinstance(way_out, ast.Return)]
            made = [(way_out.value, guard) for way_out, guard in ways]
            new = [g for value, g in made if isinstance(value, ast.Call) and name_of(value.func) in _NEW_TENSORS]
            if len(new) < len(ways):
                found += [guard for guard in new if guard is not None and isinstance(guard.node, ast.If)]
    return found[0] if len(found) == 1 else None


def may_end_early(text: str, line: int) -> bool:
    """True if the `for` statement at `line` may stop before its iterator does, or is not found.

    True for a `break` or `return` in the loop, or `zip`, `islice` over the loader.
    """
    for node in ast.walk(parsed(text) or ast.Module([], [])):
        if isinstance(node, (ast.For, ast.AsyncFor)) and node.iter.lineno <= line <= (node.iter.end_lineno or line):
            ends = any(isinstance(way_out, (ast.Break, ast.Return)) for way_out, _ in exits(node.body))
            return ends or bool(_called_in(node.iter) & {"zip", "islice", "takewhile", "cycle"})
    return True
