"""The syntax tree of a user's source file: its statements around a line, and names. Nothing is executed."""

from __future__ import annotations

import ast
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from distdiag.diagnosis.model.snapshot import Site

Source = Callable[[str], str | None]  # text of a source file by path, or None


def no_source(_file: str) -> None:
    """Return that no file can be read."""


MAX_TEXT = 1 << 20  # characters of a file; a longer one is not read
LOOPS = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields of a statement
_CACHES = {"cache", "cached", "cached_property", "lru_cache", "memoize"}


@lru_cache(16)
def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree; None if the text is no program, too long, or nested too deeply."""
    if len(text) > MAX_TEXT:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's literals
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def tree_of(file: str, source: Source) -> ast.Module | None:
    text = source(file)
    return parsed(text) if text else None


def within(node: ast.AST, line: int) -> bool:
    """True if a line lies in a statement, handler or case."""
    first, last = (node.pattern, node.body[-1]) if isinstance(node, ast.match_case) else (node, node)
    return first.lineno <= line <= (last.end_lineno or last.lineno)  # type: ignore[attr-defined]


class Step(NamedTuple):
    """A block around a line: its owner's field, and the index of the statement that has the line."""

    owner: ast.AST
    field: str
    block: list[ast.stmt]
    at: int

    @property
    def node(self) -> ast.stmt:
        return self.block[self.at]


def way(tree: ast.Module, line: int) -> Iterator[Step]:
    """Yield the blocks around a line, from the module inwards, each with the index of the line's statement."""
    owner: ast.AST = tree
    while True:
        fields = ((field, getattr(owner, field, None)) for field in _BLOCKS)
        blocks = ((field, block) for field, block in fields if isinstance(block, list))
        found = ((field, block, i) for field, block in blocks for i, x in enumerate(block) if within(x, line))
        if (at := next(found, None)) is None:
            return
        yield (step := Step(owner, *at))
        owner = step.node


def statement(tree: ast.Module, line: int) -> ast.stmt | None:
    """Return the innermost statement with a line."""
    return next(iter(_around(tree, line)), None)


def statement_at(site: Site | None, source: Source) -> ast.stmt | None:
    """Return the innermost statement at a site; None if its source is not known."""
    tree = tree_of(site.file, source) if site is not None else None
    return statement(tree, site.line) if site is not None and tree is not None else None


def _around(tree: ast.Module | None, line: int) -> list[ast.stmt]:
    return [step.node for step in way(tree, line)][::-1] if tree is not None else []


def function(tree: ast.Module, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the innermost function around a line; two classes may each have a `run`."""
    return next((node for node in _around(tree, line) if isinstance(node, FUNCTIONS)), None)


def name_of(node: ast.AST | None) -> str:
    """Return the last part of a name: `c` of `a.b.c`."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def code_of_line(text: str, line: int) -> str:
    """Return a line of a program without its comment; an empty text if there is no such line."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # as Python counts them: a form feed ends none
    code = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    if "#" not in code:
        return code
    with suppress(tokenize.TokenError, SyntaxError):  # the line may continue in the next one
        for token in tokenize.generate_tokens(iter([code]).__next__):
            if token.type == tokenize.COMMENT:
                return code[: token.start[1]].rstrip()
    return code


def line_at(site: Site | None, source: Source) -> str:
    """Return the line of a site without its comment; an empty text if it is not known or cannot be read."""
    return code_of_line(source(site.file) or "", site.line) if site is not None else ""


def keeps_results(decorator: ast.AST) -> bool:
    """True for `@lru_cache(…)` and the like: a call with arguments that it has seen does not run the function."""
    return name_of(decorator.func if isinstance(decorator, ast.Call) else decorator) in _CACHES


def is_set(node: ast.AST | None, tree: ast.Module, depth: int = 3) -> bool:
    """True for an expression that is a set, or that goes over one in its order; for a name, if all that the program assigns to it is."""
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case _ if not depth:
            return False
        case ast.Call(func=ast.Name(id="list" | "tuple" | "enumerate" | "reversed"), args=[inner, *_]):
            return is_set(inner, tree, depth - 1)
        case ast.Call(func=ast.Attribute(value=inner, attr="union" | "intersection" | "difference" | "copy")):
            return is_set(inner, tree, depth - 1)
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.Sub() | ast.BitXor()):
            return is_set(node.left, tree, depth - 1) or is_set(node.right, tree, depth - 1)
        case ast.Name(id=name):
            scopes = (function(tree, node.lineno), tree)
            made = next((made for scope in scopes if scope is not None and (made := _bindings(name, scope))), [])
        case ast.Attribute(value=ast.Name(id="self")):
            made = _bindings(ast.unparse(node), tree)
        case _:
            return False
    return bool(made) and all(is_set(value, tree, depth - 1) for value in made)


def _bindings(name: str, scope: ast.AST) -> list[ast.expr | None]:
    """Return the values that the code of a scope gives to a name; None for one that is not known, as of an argument."""
    values: list[ast.expr | None] = []
    bound = 0
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) if ast.unparse(target) == name:
                values.append(node.value)
            case ast.AugAssign(target=target):  # leaves a set one
                bound -= ast.unparse(target) == name
            case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                bound += ast.unparse(node) == name
            case ast.arg():
                bound += node.arg == name
    return values + [None] * (bound - len(values))


def calls_in(files: Iterable[str], source: Source) -> Iterator[tuple[ast.Call, Site]]:
    """Yield the calls in files, each with its site."""
    for file in files:
        tree = tree_of(file, source)
        for node in ast.walk(tree) if tree is not None else ():
            if tree is not None and isinstance(node, ast.Call):
                around = function(tree, node.lineno)
                yield node, Site(file, node.lineno, around.name if around is not None else "<module>")


def exits_process(node: ast.AST | None) -> bool:
    """True for `sys.exit(…)`, `os._exit(…)`, `exit(…)`, `quit(…)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and name_of(call.func) in ("exit", "_exit", "quit")
