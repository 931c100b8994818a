"""No function is longer than a screen or branches more than a person can follow, and no files import each other in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.jobs import REPOSITORY

LINES, BRANCHES = 60, 15
REASON = re.compile(r"# long: \w+")  # on the line of `def`, what would be worse if it were shorter
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCH = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
FILES = [path for folder in ("distdiag", "probes") for path in sorted((REPOSITORY / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    parts = ("distdiag", *parts) if parts[0] == "probes" else parts  # as it is installed
    return ".".join(parts).removesuffix(".__init__")


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node
            yield from own_nodes(node)


def too_large(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, lines, branches) of functions above a limit that give no reason."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS) and not REASON.search(lines[node.lineno - 1]):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            branches = sum(isinstance(inner, BRANCH) for inner in own_nodes(node))
            if size > LINES or branches > BRANCHES:
                yield node.name, size, branches


def imports(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Yield the modules that a file imports, in functions too; not those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        else:
            yield from imports(node, modules)


def circle(files: dict[str, str]) -> list[str]:
    """Return the modules of a circle of imports, given the text of each; nothing if there is none."""
    graph = {name: {*imports(ast.parse(text), set(files))} & files.keys() - {name} for name, text in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_function_is_too_large() -> None:
    assert not [(module_of(path), *found) for path in FILES for found in too_large(path.read_text())]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle({module_of(path): path.read_text() for path in FILES}) == []


def test_a_large_function_is_found_unless_it_gives_a_reason() -> None:
    body = "    x = 1\n" * LINES
    assert [*too_large(f"def f():\n{body}")] == [("f", LINES + 1, 0)]
    assert not [*too_large(f"def f():  # long: a table\n{body}")]
    branches = "    if x: pass\n" * (BRANCHES + 1)
    assert [*too_large(f"class A:\n  def f():\n{branches}")] == [("f", BRANCHES + 2, BRANCHES + 1)]


def test_a_circle_is_found_wherever_the_import_is() -> None:
    files = {"p.a": "import p.b", "p.b": "def f():\n  from p import c", "p.c": "from p.a import x"}
    assert set(circle(files)) == {"p.a", "p.b", "p.c"}
    assert not circle(files | {"p.c": "if TYPE_CHECKING:\n  from p.a import x"})
