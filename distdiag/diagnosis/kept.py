"""Reads from the source which statements put something into a container that outlives a step: where memory may grow."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.guards import GuardKind, guards
from distdiag.diagnosis.model.rank_tests import COUNTERS
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.model.syntax import FUNCTIONS, LOOPS, SCOPES, Source, tree_of

SHOWN = 2  # statements; of more, none is named
LONGEST = 60  # characters of a statement that are shown
_FETCHES = {"__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "collate", "collate_fn"}  # in a worker
_NUMBERS = {"val", "value"}  # of a meter's `deque`
_LIMITS = ("max", "cap", "size", "limit")  # in names
_PROGRESS = re.compile("step|epoch|iter|batch", re.IGNORECASE)  # of the job, not of a container
_BELOW, _ABOVE = (ast.Lt, ast.LtE, ast.NotEq), (ast.Gt, ast.GtE, ast.Eq)
_PUTS = {"append", "appendleft", "extend", "insert", "add"}
_SMALL = {"item", "float", "int", "len", "str", "round", "time", "perf_counter", "monotonic"}


class Kept(NamedTuple):
    """A statement that keeps something, or the decorator of a function whose results are kept; `limit` if that ends by itself.

    Attributes:
        limit: The line that holds the limit: `if len(self.items) < self.size`. None if none is known.
    """

    text: str
    site: Site
    limit: tuple[str, Site] | None = None


def kept(stacks: Iterable[Sequence[Site]], source: Source, *, in_workers: bool = False, step: int = 0) -> list[Kept]:
    """Return what is kept by the functions on these stacks and by those of their files that these call.

    What has a limit is returned only if nothing else is kept.

    Args:
        in_workers: Instead of the functions on the stacks, take those of their files that a DataLoader's workers call.
        step: Steps so far: a `deque` or `lru_cache` of fewer items is full, and does not grow.
    """
    out: dict[Kept, None] = {}
    for frame in dict.fromkeys(frame for stack in stacks for frame in stack):
        tree, text = tree_of(frame.file, source), source(frame.file) or ""
        if tree is not None:
            out |= dict.fromkeys(_kept_in(frame, tree, text, in_workers, step))
    unlimited = [x for x in out if x.limit is None]
    return (unlimited if len(unlimited) <= SHOWN else []) if unlimited else list(out)[:SHOWN]


def _kept_in(frame: Site, tree: ast.Module, text: str, in_workers: bool, step: int) -> Iterator[Kept]:
    functions = [x for x in ast.walk(tree) if isinstance(x, FUNCTIONS)]
    own_lines = [x for x in tree.body if not isinstance(x, SCOPES)]
    scopes: list[ast.AST] = [syntax.function(tree, frame.line) or ast.Module(own_lines, [])]
    if in_workers:
        scopes = [x for x in functions if x.name in _FETCHES]
    called = {syntax.name_of(x.func) for scope in scopes for x in ast.walk(scope) if isinstance(x, ast.Call)}
    others = [x for x in functions if x.name in called and x not in scopes]

    def of_line(line: int, function: ast.AST) -> tuple[str, Site]:
        code = syntax.code_of_line(text, line).removesuffix(":")
        site = Site(frame.file, line, getattr(function, "name", "<module>"))
        return code if len(code) <= LONGEST else code[:LONGEST] + "…", site

    for function in (*scopes, *others):
        for node, container in _puts(function, {x.name for x in functions}, in_workers or function in others):
            line = _limit(tree, function, node.lineno, container)
            if isinstance(node, ast.Call) and line is None and (found := _deque(tree, container)) is not None:
                line, items = found
                if items <= step or any(syntax.name_of(x) in _NUMBERS for x in node.args):
                    continue
            if isinstance(node, ast.Call) or line is not None or container is None or _is_new(tree, node, container):
                yield Kept(*of_line(node.lineno, function), of_line(line, function) if line is not None else None)
        if isinstance(function, FUNCTIONS) and (cache := _cache(function)) is not None:
            line, most = cache
            if most is None or most > step:
                yield Kept(*of_line(line, function), None if most is None else of_line(line, function))


def _puts(function: ast.AST, own: set[str], called: bool) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr | None]]:
    """Yield (statement or call, container) for what puts something large into a container of its object, its caller or its module.

    Args:
        own: Names of functions in the file: `log.add(…)` calls one of them.
        called: A function that is called in every step: its own containers die with it. Else they live if the call is in a loop.
    """
    for node in _adds_up(function):
        yield node, None
    bodies = [function] if called else [x for x in ast.walk(function) if isinstance(x, LOOPS)]
    for node in ast.walk(function):
        container = _container(node, own)
        if (root := _root(container)) is None:
            continue
        around = [loop for loop in bodies if any(x is node for x in ast.walk(loop))]
        names = (x for body in around for x in ast.walk(body) if isinstance(x, ast.Name))
        inside = {x.id for x in names if isinstance(x.ctx, ast.Store)}
        if (around or root is not container) and root.id not in inside:
            assert isinstance(node, (ast.stmt, ast.expr))
            yield node, container


def _container(node: ast.AST, own: set[str]) -> ast.expr | None:
    """Return the container into which a call or an assignment to an item puts something large."""
    match node:
        case ast.Call(func=ast.Attribute(value=container, attr=method), args=values) if method in _PUTS - own:
            return container if any(map(_large, values)) else None
        case ast.Assign(targets=[ast.Subscript(value=container, slice=key)], value=value) if _large(value):
            return None if isinstance(key, ast.Slice) else container
    return None


def _root(node: ast.expr | None) -> ast.Name | None:
    """Return the name `a` of `a.b[c].d`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node if isinstance(node, ast.Name) else None


# -- limits ----------------------------------------------------------------------------------------------------------


def _conditions(tree: ast.Module, line: int) -> Iterator[tuple[ast.expr, bool, int]]:
    """Yield (test, what it must be, its line) for each `if` that decides whether a line runs."""
    for guard in guards(tree, line):
        if guard.kind in (GuardKind.HOLDS, GuardKind.PASSED) and isinstance(guard.node, ast.If):
            yield guard.node.test, (guard.kind is GuardKind.HOLDS) == (guard.branch == "body"), guard.line


def _is_new(tree: ast.Module, node: ast.stmt | ast.expr, container: ast.expr) -> bool:
    """True if an item is set only if it was not in the container: `if i not in self.cache: self.cache[i] = …`."""
    for test, truth, _ in _conditions(tree, node.lineno):
        match test:
            case ast.Compare(ops=[ast.NotIn() | ast.In() as op], comparators=[other]) if _same(other, container):
                return isinstance(op, ast.NotIn) == truth
    return False


def _limit(tree: ast.Module, function: ast.AST, line: int, container: ast.expr | None) -> int | None:
    """Return the line of the `if` or `while` by which a container gets no more items, or loses one for each new one."""
    if container is None:
        return None
    counted = {ast.unparse(x.target) for x in ast.walk(function) if isinstance(x, ast.AugAssign)}
    for test, truth, at in _conditions(tree, line):
        if _has_room(test, container, truth, counted):
            return at
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.While)) and _has_room(node.test, container, False, counted):
            for inner in (x for statement in node.body for x in ast.walk(statement)):
                match inner:
                    case ast.Call(func=ast.Attribute(value=other, attr="pop" | "popleft" | "popitem" | "clear")):
                        gone: list[ast.expr] = [other]
                    case ast.Delete(targets=targets) | ast.Assign(targets=targets):
                        gone = [x.value if isinstance(x, ast.Subscript) else x for x in targets]
                    case _:
                        gone = []
                if any(_same(x, container) for x in gone):
                    return node.lineno
    return None


def _has_room(test: ast.expr, container: ast.expr, truth: bool, counted: set[str]) -> bool:
    """True if a container has room where a test is `truth`: `len(self.items) < self.size`, `not self.full`."""
    for x in ast.walk(test):
        match x:
            case ast.UnaryOp(op=ast.Not(), operand=inner) if _has_room(inner, container, not truth, counted):
                return True
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                below = _BELOW if truth else _ABOVE
                if isinstance(op, below) and _counts(left, right, container, counted):
                    return True
                if isinstance(op, _ABOVE[:2] if truth else _BELOW[:2]) and _counts(right, left, container, counted):
                    return True
    name = syntax.name_of(test.func if isinstance(test, ast.Call) else test)
    return not truth and name.strip("_") in ("full", "is_full")


def _counts(size: ast.expr, limit: ast.expr, container: ast.expr, counted: set[str]) -> bool:
    """True for `len(container)` and a limit; also for a count of the container's object and an attribute named as its limit.

    Args:
        counted: What the function adds something to.
    """
    match size:
        case ast.Call(func=ast.Name(id="len"), args=[of]):
            owner = container.value if isinstance(container, ast.Attribute) else container
            small = isinstance(limit, ast.Constant) and limit.value in (0, 1)
            return not small and (_same(of, container) or _same(of, owner))
        case ast.Attribute(value=owner) if isinstance(limit, ast.Attribute) and isinstance(container, ast.Attribute):
            named = any(word in limit.attr.lower() for word in _LIMITS) and not _PROGRESS.search(limit.attr + size.attr)
            return named and ast.unparse(size) in counted and ast.unparse(owner) == ast.unparse(container.value)
    return False


def _same(a: ast.expr, b: ast.expr) -> bool:
    return ast.unparse(a) == ast.unparse(b)


def _deque(tree: ast.Module, container: ast.expr | None) -> tuple[int, float] | None:
    """Return (line, most items) of the `deque(maxlen=…)` that this name or attribute is set to; infinite: as many as a variable."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(made := node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            most = [*made.args[1:2], *(k.value for k in made.keywords if k.arg == "maxlen")]
            named = container is not None and any(_same(x, container) for x in targets)
            if named and syntax.name_of(made.func) == "deque" and most and (items := _most(most[0])) is not None:
                return node.lineno, items
    return None


def _cache(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, float | None] | None:
    """Return (line, most results) of a function's `lru_cache` or `cache`; None results: without a limit."""
    arguments = function.args
    for x in function.decorator_list if arguments.args or arguments.vararg or arguments.kwonlyargs else ():
        name = ast.unparse(x.func if isinstance(x, ast.Call) else x).removeprefix("functools.")
        if name == "cache":
            return x.lineno, None
        if name == "lru_cache":
            most = [*x.args, *(k.value for k in x.keywords if k.arg == "maxsize")] if isinstance(x, ast.Call) else []
            return x.lineno, _most(most[0]) if most else 128  # functools' default
    return None


def _most(value: ast.expr) -> float | None:
    """Return a limit; None: there is none. A variable may have any value."""
    known = value.value if isinstance(value, ast.Constant) else math.inf
    return known if isinstance(known, (int, float)) else None


# -- values ----------------------------------------------------------------------------------------------------------


def _adds_up(function: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that add a loss to an attribute, with its graph: `self.mean = 0.9 * self.mean + 0.1 * loss`."""
    for node in ast.walk(function):
        if not isinstance(node, (ast.Assign, ast.AugAssign)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Attribute):
            continue
        read = {ast.dump(x) for x in ast.walk(node.value) if isinstance(x, ast.Attribute)}
        again = isinstance(node, ast.AugAssign) or ast.dump(target).replace("Store()", "Load()") in read
        parts = [x for x in ast.walk(node.value) if isinstance(x, ast.Name) and "loss" in x.id.lower()]
        calls = {syntax.name_of(x.func) for x in ast.walk(node.value) if isinstance(x, ast.Call)}
        if again and parts and not calls & (_SMALL | {"detach"}):
            yield node


def _large(value: ast.expr) -> bool:
    """True unless a value is a number or a text, or a tuple of those and of counters."""
    if isinstance(value, ast.Tuple):
        return any(_large(x) and syntax.name_of(x) not in COUNTERS for x in value.elts)
    called = syntax.name_of(value.func) if isinstance(value, ast.Call) else ""
    if isinstance(value, ast.Constant) and value.value is None:  # a slot that is filled later
        return True
    return not isinstance(value, (ast.Constant, ast.JoinedStr)) and called not in _SMALL
