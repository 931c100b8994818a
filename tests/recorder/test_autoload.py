"""What `import torch` calls in every process of the environment: torch cannot be imported if it fails."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY, clean_env

# As torch loads its entry points: any exception makes `import torch` fail.
LOAD = """
import importlib, sys
module, function = sys.argv.pop(1).split(":")
getattr(importlib.import_module(module), function)()
assert sys.argv[1:] == ["-m", "distdiag.run"] or "distdiag" not in sys.modules, "it imported more than itself"
"""


def entry_point() -> str:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return project["entry-points"]["torch.backends"]["distdiag"]


def test_its_module_imports_nothing() -> None:
    tree = ast.parse((REPOSITORY / f"{entry_point().partition(':')[0]}.py").read_text())
    assert not [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]


@pytest.mark.parametrize("arguments", [("-m", "distdiag.run"), ("train.py",)])
@pytest.mark.parametrize("hides", ["", "raise SystemError('not the distdiag that was installed')"])
def test_another_package_of_our_name_does_not_break_it(tmp_path: Path, arguments: tuple[str, ...], hides: str) -> None:
    (tmp_path / "distdiag").mkdir()
    (tmp_path / "distdiag" / "__init__.py").write_text(hides)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, entry_point(), *arguments],
        cwd=tmp_path, env=clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY)}), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
