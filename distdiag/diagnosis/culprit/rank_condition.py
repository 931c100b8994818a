"""Finds conditions in the user's source: on the rank (`if rank == 0:` around a call, `if rank: return` before it), or on data."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from distdiag.diagnosis.model.snapshot import Site

Source = Callable[[str], str | None]
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_RANK_WORDS = {"rank", "main", "master", "chief", "leader", "primary", "coordinator"}
_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK")  # environment variables
_OF_PROCESS = {"index", "zero", "id"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


class Condition(NamedTuple):
    """A condition's line number, and the text of that line.

    Attributes:
        names_leaver: True if it names the rank that leaves before the call: `if rank == 1: return`. Else it names the rank that
            makes the call: `if rank == 0:` around it, `if rank != 0: return` before it.
    """

    file: str
    line: int
    text: str
    names_leaver: bool = False


def around(stack: Sequence[Site], other: Sequence[Site], source: Source) -> Condition | None:
    """Return the condition on the rank that leads to one site of a program and not to another; None if there is none.

    Args:
        stack, other: The user's frames of two ranks, innermost first.
        source: Text of a source file by path, or None.
    """
    mine, theirs = list(reversed(stack)), list(reversed(other))
    if not mine or not theirs or _function(mine[0]) != _function(theirs[0]):
        return None
    common = 0
    while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
        common += 1
    for i, frame in enumerate(mine[common:], common):
        their_line = (
            theirs[i].line if i == common and i < len(theirs) and _function(theirs[i]) == _function(frame) else None
        )
        text = source(frame.file)
        found = _condition(text, frame.line, their_line) if text else None
        if text and found is not None:
            names_leaver = _guards(found, text, frame.line) and _names_who_leaves(found)
            return Condition(frame.file, found.lineno, _text_of(found, text), names_leaver)
    return None


def enclosing(site: Site | None, source: Source) -> Condition | None:
    """Return the innermost `if` whose body holds a site, on the rank or on data; None if there is none in its function."""
    text = source(site.file) if site is not None else None
    tree = parsed(text) if text else None
    if site is None or text is None or tree is None:
        return None
    found = None
    for block, at in path(tree, site.line):
        statement = block[at]
        if isinstance(statement, _Function):
            found = None
        elif isinstance(statement, ast.If) and any(
            x.lineno <= site.line <= (x.end_lineno or x.lineno) for x in statement.body
        ):
            found = statement.lineno
    if found is None:
        return None
    return Condition(site.file, found, code_of_line(text, found).removesuffix(":"))


def only_under(name: str, file: str, source: Source) -> Condition | None:
    """Return the `if` around the only call of a module in the file: `self.name(…)` or `model.name(…)`; None if there is none."""
    text = source(file)
    tree = parsed(text) if text else None
    if text is None or tree is None:
        return None
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", None) == name]
    if len(calls) != 1:
        return None
    choices = [n for n in ast.walk(tree) if isinstance(n, ast.IfExp) and any(x is calls[0] for x in ast.walk(n.body))]
    if choices:
        test = choices[-1].test
        return Condition(file, test.lineno, f"if {ast.get_source_segment(text, test)}")
    return enclosing(Site(file, calls[0].lineno), source)


def _function(site: Site) -> tuple[str, str]:
    return site.file, site.function


@lru_cache(16)
def parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def code_of_line(text: str, line: int) -> str:
    """Return a line of a program without its comment; an empty text if there is no such line."""
    lines = text.splitlines()
    code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    if "#" not in code:
        return code
    with suppress(tokenize.TokenError, SyntaxError):  # the line may continue in the next one
        for token in tokenize.generate_tokens(iter([code]).__next__):
            if token.type == tokenize.COMMENT:
                return code[: token.start[1]].rstrip()
    return code


def _text_of(node: ast.expr | ast.stmt, text: str) -> str:
    """Return a condition as the program has it: the line of an `if` or a decorator, or what a conditional expression tests."""
    if isinstance(node, ast.IfExp):
        return f"if {ast.get_source_segment(text, node.test)}"
    if isinstance(node, ast.BoolOp):
        return f"{ast.get_source_segment(text, node.values[0])} {'and' if isinstance(node.op, ast.And) else 'or'} …"
    return code_of_line(text, node.lineno)


def _condition(text: str, line: int, their_line: int | None) -> ast.expr | ast.stmt | None:
    """Return the condition that leads to `line` and not to `their_line`, another line of the same function."""
    tree = parsed(text)
    if tree is None:
        return None
    ranks = _names_of_the_rank(text)
    found: ast.expr | ast.stmt | None = None
    for block, at in path(tree, line):
        statement = block[at]
        if isinstance(statement, _Function):  # a condition around a function's definition does not apply to its calls
            found = None if their_line is not None else next(_decorators(statement, ranks), None)
            continue
        guards = (g for g in block[:at] if isinstance(g, ast.If) and _leaves(g) and _asks_for_rank(g.test, ranks))
        for guard in guards:
            if their_line is None or their_line <= (guard.end_lineno or guard.lineno):
                found = guard
        if their_line is not None and (left := _left_by_break(block[:at], their_line, ranks)) is not None:
            found = left
        if isinstance(statement, ast.If) and not statement.orelse and _asks_for_rank(statement.test, ranks):
            inside = their_line is not None and statement.lineno <= their_line <= (statement.end_lineno or their_line)
            if not inside and line > statement.test.lineno:
                found = statement
        if _simple(statement) and (
            their_line is None or not statement.lineno <= their_line <= (statement.end_lineno or their_line)
        ):
            found = next(_in_expression(statement, ranks), found)
    return found


def _simple(statement: ast.stmt) -> bool:
    """True if the statement holds no block of others."""
    return not hasattr(statement, "body") and not hasattr(statement, "cases")


def _in_expression(statement: ast.stmt, ranks: Collection[str]) -> Iterator[ast.expr]:
    """Yield expressions that call something on some ranks only: `f() if rank == 0 else None`, `rank == 0 and f()`."""
    for node in ast.walk(statement):
        if (
            isinstance(node, ast.IfExp)
            and _asks_for_rank(node.test, ranks)
            and _calls(node.body) != _calls(node.orelse)
        ) or (
            isinstance(node, ast.BoolOp) and _asks_for_rank(node.values[0], ranks) and any(map(_calls, node.values[1:]))
        ):
            yield node


def _calls(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Call) for n in ast.walk(node))


def _left_by_break(before: Sequence[ast.stmt], their_line: int, ranks: Collection[str]) -> ast.If | None:
    """Return the `if` on the rank that ended a loop here while the other rank is still in it; None if there is none."""
    for loop in before:
        if isinstance(loop, (ast.For, ast.While)) and loop.lineno <= their_line <= (loop.end_lineno or loop.lineno):
            for node in ast.walk(loop):
                if (
                    isinstance(node, ast.If)
                    and any(isinstance(x, ast.Break) for x in node.body)
                    and _asks_for_rank(node.test, ranks)
                ):
                    return node
    return None


def path(node: ast.AST, line: int) -> Iterator[tuple[list[ast.stmt], int]]:
    """Return the path from the module to a line: each block of statements, and the index of the statement with the line."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        for i, child in enumerate(block):
            if isinstance(child, (ast.ExceptHandler, ast.match_case)):
                yield from path(child, line)
            elif child.lineno <= line <= (child.end_lineno or child.lineno):
                yield block, i
                yield from path(child, line)
                return


def _decorators(node: ast.AST, ranks: Collection[str]) -> Iterator[ast.expr]:
    """Yield decorators that let a function run on some ranks only: `@rank_zero_only`, `@on_main_process`."""
    for decorator in getattr(node, "decorator_list", ()):
        if _asks_for_rank(decorator, ranks):
            yield decorator


def asks_for_rank(condition: str, text: str) -> bool:
    """True if the source line of an `if` tests the rank. `text` is the whole source, to find variables that hold the rank."""
    tree = parsed(condition.removesuffix(":") + ": pass")
    test = tree.body[0] if tree is not None and tree.body else None
    return isinstance(test, ast.If) and _asks_for_rank(test.test, _names_of_the_rank(text))


def _leaves(guard: ast.If) -> bool:
    return not guard.orelse and isinstance(guard.body[-1], (ast.Return, ast.Continue, ast.Raise, ast.Break))


def _guards(found: ast.expr | ast.stmt, text: str, line: int) -> bool:
    """True for an `if` that leaves before the line and in a block around it: whom it holds for does not get there."""
    tree = parsed(text)
    if not isinstance(found, ast.If) or not _leaves(found) or tree is None:
        return False
    return any(found is statement for block, at in path(tree, line) for statement in block[:at])


def _names_who_leaves(guard: ast.expr | ast.stmt) -> bool:
    """True if the test holds for the rank that it names: `rank == 1`, `is_main`; not `rank`, `rank != 0`, `not is_main`."""
    test = guard.test if isinstance(guard, ast.If) else None
    for part in test.values if isinstance(test, ast.BoolOp) else [test]:
        if isinstance(part, ast.Compare) and _asks_for_rank(part):
            return all(isinstance(op, ast.Eq) for op in part.ops)
        name = getattr(part, "attr", None) or getattr(part, "id", "")
        if {w.lower() for w in _WORDS.findall(name)} & (_RANK_WORDS - {"rank"}):
            return True
    return False


def _asks_for_rank(test: ast.expr, ranks: Collection[str] = ()) -> bool:
    names = {getattr(n, "attr", None) or getattr(n, "id", "") for n in ast.walk(test)}
    words = [{w.lower() for w in _WORDS.findall(name)} for name in names]
    process = any("process" in w and w & _OF_PROCESS for w in words)  # process_index, is_world_process_zero
    variable = any(isinstance(n, ast.Constant) and n.value in _VARIABLES for n in ast.walk(test))
    return process or variable or bool(names & set(ranks)) or any(w & _RANK_WORDS and "thread" not in w for w in words)


@lru_cache(16)
def _names_of_the_rank(text: str) -> frozenset[str]:
    """Return variables that hold the rank or a comparison with it: `r = dist.get_rank()`, `first = rank == 0`."""
    found: set[str] = set()
    for node in ast.walk(parsed(text) or ast.Module([], [])):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for name, given in pairs:
            name = getattr(name, "attr", None) or getattr(name, "id", "")
            asked = isinstance(given, ast.Compare) and _asks_for_rank(given)
            if isinstance(given, ast.Call):
                asked = _asks_for_rank(given.func) or any(
                    isinstance(n, ast.Constant) and n.value in _VARIABLES for n in ast.walk(given)
                )
            if asked and name:
                found.add(name)
    return frozenset(found)
