"""Reads from a source which conditions decide whether a line runs: its guards (control dependence on the syntax tree).

A guard is a statement or expression and the branch of it that the line needs, in program order from the start
of the function: the `if` around the line, an earlier `if` whose arm leaves (`return`, `continue`, `break`,
`raise`, `sys.exit`), a loop that it is in or that must have ended, an exception that must not have been
raised, a decorator. Nothing is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from distdiag.diagnosis.model import rank_tests, syntax
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.model.syntax import (
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

ELSE = " … else"  # ends the text of a condition whose other branch is meant
_EXITS = (ast.Return, ast.Break, ast.Continue, ast.Raise)
_Node = ast.stmt | ast.expr | ast.ExceptHandler | ast.match_case


class GuardKind(Enum):
    """How a guard decides about the line."""

    HOLDS = auto()  # the line is in this branch
    PASSED = auto()  # the line runs only if this branch, which leaves before it, was not taken
    INSIDE = auto()  # the line is in this loop
    ENDED = auto()  # the line runs only after this loop has ended
    REPEATED = auto()  # this comprehension makes the line's call in each round


class Guard(NamedTuple):
    """One condition of a line, or of a call on a stack.

    Attributes:
        node: The `if`, loop, handler, case, `with`, conditional expression, comprehension or decorator.
        branch: The branch that the line is in, or that leaves before it: "body" or "orelse".
        test: What is tested; None for an exception.
        way_out: The statement that leaves in the branch of a PASSED guard; None if an exception skips the
            rest of a block.
        upto: For an exception that skips the rest of a `try` or `with`: the line that it skips, else 0.
        site, depth: The frame whose line it guards, and the number of its callers.
        source: Text of its file.
        rank_names: Names that hold the rank in the files of the stack.
    """

    kind: GuardKind
    node: _Node
    branch: str = "body"
    test: ast.expr | None = None
    way_out: ast.stmt | None = None
    upto: int = 0
    site: Site = Site("", 0)
    depth: int = 0
    source: str = ""
    rank_names: frozenset[str] = frozenset()

    def key(self, kind: GuardKind | None = None) -> tuple[object, ...]:
        """Return what it has in common with the same guard of another line, or with one of another kind: a loop that ended."""
        start = self.node.pattern if isinstance(self.node, ast.match_case) else self.node
        return kind or self.kind, self.branch, type(self.node), start.lineno, start.col_offset

    @property
    def line(self) -> int:
        """Line of the condition's text."""
        return self.node.pattern.lineno if isinstance(self.node, ast.match_case) else self.node.lineno

    @property
    def text(self) -> str:
        """The condition as in the program, on one line and without its colon; of the branch without it `if x … else`."""
        node, test, line = self.node, self.test, code_of_line(self.source, self.line).removesuffix(":")
        several = test is not None and (test.end_lineno or 0) > self.line  # lines

        def asked() -> str:
            assert test is not None
            return ast.unparse(test) if several else ast.get_source_segment(self.source, test) or ""

        match node:
            case ast.BoolOp():
                line = f"{asked()} {'and' if isinstance(node.op, ast.And) else 'or'} …"
            case ast.match_case():
                line = f"match {asked()}: {line}"
            case ast.While() | ast.If() if several:
                line = f"{'while' if isinstance(node, ast.While) else 'elif' if line.startswith('elif') else 'if'} {asked()}"
            case ast.For() | ast.AsyncFor() if several:
                line = f"for {ast.unparse(node.target)} in {asked()}"
            case ast.expr() | ast.With() | ast.AsyncWith() if self.kind is GuardKind.HOLDS and test is not node:
                line = f"if {asked()}"
        return line + ELSE if self.branch == "orelse" else line

    @property
    def keeps_results(self) -> bool:
        """True for a decorator that keeps the results of its function: a rank that has the result does not run it."""
        return self.branch == "decorator" and syntax.keeps_results(self.node)

    @property
    def place(self) -> Site:
        return Site(self.site.file, self.line, self.site.function)

    @property
    def on_rank(self) -> bool:
        return rank_tests.reads_rank(self.test, self.rank_names)

    @property
    def keeps_to_some(self) -> bool:
        """True for a branch that another rank may not need: the other branch calls nothing, else the two may belong together."""
        if self.kind is not GuardKind.HOLDS or not isinstance(self.node, (ast.If, ast.IfExp)):
            return self.kind is GuardKind.HOLDS
        other = getattr(self.node, "orelse" if self.branch == "body" else "body")
        return not any(map(_called_in, other if isinstance(other, list) else [other]))

    @property
    def is_fixed(self) -> bool:
        """True if it tests only what is set once in a rank: `if self.last`."""
        return self.test is not None and rank_tests.fixed(self.test, self.source)

    def can_differ(self, alive: bool = True) -> bool:
        """True if it can have another result on another rank; a rank that is alive has not ended its process."""
        equal = rank_tests.constants(self.source)
        if self.branch == "decorator":
            return self.on_rank or self.keeps_results
        if isinstance(self.node, LOOPS):
            return rank_tests.can_end_unevenly(self.node, equal)
        return not (alive and exits_process(self.way_out)) and rank_tests.can_differ(self.test, equal)

    def ways_out(self, *by: type[ast.stmt]) -> Iterator[Guard]:
        """Yield the guards of such statements by which a loop, or a round of it, ends."""
        assert isinstance(self.node, LOOPS)
        for way_out, guard in exits(self.node.body):
            if isinstance(way_out, by) and guard is not None:
                yield self._replace(**{x: getattr(guard, x) for x in guard._fields[:6]})


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
                if around is not None and isinstance(around.node, ast.ExceptHandler):
                    pass  # a rank without that exception evaluates nothing in its handler
                elif isinstance(node, ast.If):
                    guard = Guard(GuardKind.PASSED, node, field, node.test)
                elif isinstance(child, ast.ExceptHandler):
                    guard = Guard(GuardKind.PASSED, child)
                elif isinstance(child, ast.match_case) and isinstance(node, ast.Match):
                    guard = Guard(GuardKind.PASSED, child, test=node.subject)
                inner.append((child, guard, in_loop))
        todo += reversed(inner)


@lru_cache(512)
def guards(tree: ast.Module, line: int, callee: str = "") -> tuple[Guard, ...]:
    """Return the guards of a line in program order from the start of its function; of the module if it is in none.

    Args:
        callee: Name of the function that the line calls, if known: which part of an expression runs.
    """
    out: list[Guard] = []
    node: ast.stmt | None = None
    for step in way(tree, line):
        out += _around(step, line, callee)
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


def on_stack(stack: Sequence[Site], source: Source, callee: str = "") -> list[Guard]:
    """Return the guards of the calls on a stack, which is innermost first: the outermost first.

    Args:
        callee: What its innermost line calls, if known.
    """
    out: list[Guard] = []
    names = frozenset().union(*(rank_tests.rank_variables(source(file) or "") for file in {x.file for x in stack}))
    called = [*(site.function for site in stack[-2::-1]), callee]
    for depth, (site, name) in enumerate(zip(stack[::-1], called, strict=False)):
        if (tree := tree_of(site.file, source)) is not None:
            frame = {"site": site, "depth": depth, "source": source(site.file) or "", "rank_names": names}
            found = (guard for guard in guards(tree, site.line, name) if not _opposed(tree, guard, site.line))
            out += (guard._replace(**frame) for guard in found)
    return out


def handler_past(stack: Sequence[Site], source: Source) -> Guard | None:
    """Return the innermost `except` around the frames of a stack after which the script goes on; None if there is none."""
    around = reversed(on_stack(stack, source))
    return next((g for g in around if g.kind is GuardKind.PASSED and isinstance(g.node, ast.ExceptHandler)), None)


def _loop(kind: GuardKind, node: ast.For | ast.AsyncFor | ast.While) -> Guard:
    return Guard(kind, node, test=node.test if isinstance(node, ast.While) else node.iter)


def _around(step: Step, line: int, callee: str) -> Iterator[Guard]:
    """Yield what the statement around a block lets it run by."""
    owner = step.owner
    match owner:
        case ast.If() if line > (owner.test.end_lineno or 0) or not _may_call(owner, callee):
            yield Guard(GuardKind.HOLDS, owner, step.field, owner.test)
        case ast.For() | ast.AsyncFor() | ast.While():
            yield _loop(GuardKind.INSIDE if step.field == "body" else GuardKind.ENDED, owner)
            if step.field == "orelse":  # a `break` skips it
                breaks = (guard for way_out, guard in exits(owner.body) if isinstance(way_out, ast.Break))
                yield from (guard._replace(way_out=None) for guard in breaks if guard is not None)
        case ast.Try() if step.field in ("body", "orelse"):
            for handler in owner.handlers:
                ways = [way_out for way_out, _ in exits(handler.body)]  # a handler may raise only some errors again
                if handler.body[-1] not in ways or any(
                    isinstance(x, (ast.Return, ast.Break, ast.Continue)) for x in ways
                ):
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

    def calls(parts: Iterable[ast.AST]) -> bool:
        names = set().union(*map(_called_in, parts))
        return callee in names if callee in in_all else bool(names)

    for part in (x for child in own for x in ast.walk(child)):
        found: list[tuple[ast.expr, str, list[ast.expr]]] = []
        match part:
            case ast.IfExp():
                found = [(part.test, arm, [getattr(part, arm)]) for arm in ("body", "orelse")]
            case ast.BoolOp():
                found = [(part.values[0], "body", part.values[1:])]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                tests = [test for loop in part.generators for test in loop.ifs]
                made = [part.key, part.value] if isinstance(part, ast.DictComp) else [part.elt]
                found = [(test, "body", made) for test in tests]
                # what it goes over is called once
                if calls([*made, *tests, *(x.iter for x in part.generators[1:])]):
                    yield Guard(GuardKind.REPEATED, part, test=part.generators[0].iter)
        fits = [(test, branch) for test, branch, arm in found if calls(arm)]
        if len(fits) == 1:  # if both branches call something, either may be the line's
            ((test, branch),) = fits
            yield Guard(GuardKind.HOLDS, part, branch, test)  # type: ignore[arg-type]


def _called_in(node: ast.AST) -> set[str]:
    """Return the names of what is called in an expression."""
    return {name_of(x.func) or "()" for x in ast.walk(node) if isinstance(x, ast.Call)}


def _may_call(node: ast.If, callee: str) -> bool:
    """True if the test of an `if` may make the line's call: that of something that can differ between ranks, and is not the rank."""
    if callee in set().union(*map(_called_in, node.body)) - _called_in(node.test):
        return False
    calls = (x.func for x in ast.walk(node.test) if isinstance(x, ast.Call))
    return any(not rank_tests.reads_rank(x) and rank_tests.can_differ(x) for x in calls)


def takes_turns(site: Site, source: Source) -> bool:
    """True if a call at a site is under a condition whose opposite has the same call in that function."""
    tree = tree_of(site.file, source)
    return tree is not None and any(_opposed(tree, guard, site.line) for guard in guards(tree, site.line))


_OPPOSITE = {ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.Lt: ast.GtE, ast.Gt: ast.LtE}


def _opposed(tree: ast.Module, guard: Guard, line: int) -> bool:
    """True if another `if` of the function with the opposite test makes the same call: `main_process_first` has a barrier for either."""
    if guard.kind is not GuardKind.HOLDS or not isinstance(guard.node, ast.If):
        return False
    around, node = syntax.function(tree, line), syntax.statement(tree, line)
    if around is None or node is None:
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


def may_end_early(text: str, line: int) -> bool:
    """True if the `for` statement at `line` may stop before its iterator does, or is not found.

    True for a `break` or `return` in the loop, or `zip`, `islice` over the loader.
    """
    for node in ast.walk(parsed(text) or ast.Module([], [])):
        if isinstance(node, (ast.For, ast.AsyncFor)) and node.iter.lineno <= line <= (node.iter.end_lineno or line):
            ends = any(isinstance(way_out, (ast.Break, ast.Return)) for way_out, _ in exits(node.body))
            return ends or bool(_called_in(node.iter) & {"zip", "islice", "takewhile", "cycle"})
    return True
