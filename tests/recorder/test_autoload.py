"""The entry point that `import torch` calls cannot keep torch from being imported, whatever the environment holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY

MODULE = REPOSITORY / "_distdiag_autoload.py"


def test_the_entry_point_is_in_a_module_that_imports_nothing() -> None:
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    assert points == {"distdiag": f"{MODULE.stem}:autoload"}
    parsed = ast.parse(MODULE.read_text())
    assert [type(node).__name__ for node in parsed.body] == ["Expr", "FunctionDef"]  # a docstring and the function


@pytest.mark.parametrize("package", ["raise RuntimeError('another package of this name')", "", None])
def test_torch_is_imported_where_distdiag_cannot_be(tmp_path: Path, package: str | None) -> None:
    """Under the name distdiag lies another package that fails, one that lacks our modules, or a file that is no Python."""
    (tmp_path / "distdiag").mkdir()
    (tmp_path / "distdiag" / "__init__.py").write_bytes(b"\0" if package is None else package.encode())
    program = (
        f"import sys; sys.argv = ['torchrun', '-m', 'distdiag.run']; sys.path[:0] = [{str(tmp_path)!r}, {str(REPOSITORY)!r}]\n"
        f"from {MODULE.stem} import autoload\nautoload()\nprint('distdiag' in str(sys.modules.get('distdiag', 'distdiag')))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize(("value", "installed"), [("1", True), ("0", False), ("", False), (None, False)])
def test_an_empty_variable_is_as_one_that_is_not_set(value: str | None, installed: bool) -> None:
    """A template of a cluster has `DISTDIAG=${RECORD:-}`."""
    program = f"from {MODULE.stem} import autoload\nimport sys\nautoload()\nprint('distdiag.everywhere' in sys.modules)"
    env = {"PYTHONPATH": str(REPOSITORY), **({} if value is None else {"DISTDIAG": value})}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{installed}\n", done.stderr
