"""Reads from the source which statements put something into a container that outlives a step: where memory may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.rank_tests import COUNTERS
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.model.syntax import FUNCTIONS, LOOPS, SCOPES, Source, tree_of

SHOWN = 2  # statements; of more, none is named
LONGEST = 60  # characters of a statement that are shown
_PUTS = {"append", "appendleft", "extend", "insert", "add"}
_SMALL = {"item", "float", "int", "len", "str", "round", "time", "perf_counter", "monotonic"}


def kept(stacks: Iterable[Sequence[Site]], source: Source) -> list[tuple[str, Site]]:
    """Return (text, site) of each such statement in the functions on these stacks and in those of their files that these call."""
    out: dict[tuple[str, Site], None] = {}
    for frame in dict.fromkeys(frame for stack in stacks for frame in stack):
        tree, text = tree_of(frame.file, source), source(frame.file) or ""
        if tree is None:
            continue
        own_lines = [x for x in tree.body if not isinstance(x, SCOPES)]
        scope = syntax.function(tree, frame.line) or ast.Module(own_lines, [])
        called = {syntax.name_of(x.func) for x in ast.walk(scope) if isinstance(x, ast.Call)}
        others = [x for x in ast.walk(tree) if isinstance(x, FUNCTIONS) and x.name in called and x is not scope]
        own = {x.name for x in ast.walk(tree) if isinstance(x, FUNCTIONS)}
        for function, again in ((scope, False), *((x, True) for x in others)):
            for node in _puts(function, own, again):
                site = Site(frame.file, node.lineno, getattr(function, "name", "<module>"))
                code = syntax.code_of_line(text, node.lineno)
                out[code if len(code) <= LONGEST else code[:LONGEST] + "…", site] = None
    return list(out) if len(out) <= SHOWN else []


def _puts(function: ast.AST, own: set[str], called: bool) -> Iterator[ast.Call | ast.stmt]:
    """Yield the calls in a function that put something large into a container of its object, its caller or its module.

    Args:
        own: Names of functions in the file: `log.add(…)` calls one of them.
        called: A function that is called in every step: its own containers die with it. Else they live if the call is in a loop.
    """
    yield from _adds_up(function)
    bodies = [function] if called else [x for x in ast.walk(function) if isinstance(x, LOOPS)]
    for node in (x for x in ast.walk(function) if isinstance(x, ast.Call)):
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr not in _PUTS - own or not any(map(_large, node.args)):
            continue
        root = method.value
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        around = [loop for loop in bodies if any(x is node for x in ast.walk(loop))]
        names = (x for body in around for x in ast.walk(body) if isinstance(x, ast.Name))
        inside = {x.id for x in names if isinstance(x.ctx, ast.Store)}
        in_object = root is not method.value
        if (around or in_object) and isinstance(root, ast.Name) and root.id not in inside:
            yield node


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
    return not isinstance(value, (ast.Constant, ast.JoinedStr)) and called not in _SMALL
