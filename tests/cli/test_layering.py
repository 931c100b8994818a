"""What each entry point imports, measured in a fresh process by reading `sys.modules` at its end.

Times depend on the machine, imports do not: torch costs 1.6 s of CPU, pandas 0.4, textual 0.25, numpy 0.1.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.cli import COMMANDS
from tests.jobs import REPOSITORY, clean_env
from tests.report.runs import DEADLOCK, make_run

HEAVY = frozenset(
    {"torch", "numpy", "pandas", "textual", "rich", "matplotlib", "jinja2", "prometheus_client", "pooch", "pynvml"}
)
# Our own modules are listed by package, others by top-level package.
OURS = frozenset(
    f"distdiag.{p}"
    for p in (
        "recorder",
        "monitor",
        "store",
        "diagnosis",
        "sources",
        "probekit",
        "page",
        "report",
        "tui",
        "train",
        "tapes",
        "attach",
        "assistant",
        "callbacks",
    )
)

_PROLOGUE = """
import atexit, os, sys
def tell():
    open(os.environ["MODULES"], "w").write("\\n".join(sys.modules))
atexit.register(tell)
"""


def imported(code: str, tmp_path: Path, expect: int | None = 0) -> set[str]:
    """Return the top-level packages, and our own packages, that are loaded after `code` has run in its own process."""
    listing = tmp_path / "modules"
    ended = subprocess.run(
        [sys.executable, "-c", _PROLOGUE + code],
        cwd=tmp_path,
        env=clean_env(tmp_path / "home", {"MODULES": str(listing)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert expect is None or ended.returncode == expect, ended.stderr
    names = listing.read_text().split()
    return {n.partition(".")[0] for n in names} | {
        ".".join(n.split(".")[:2]) for n in names if n.startswith("distdiag.")
    }


def command(*args: str | Path) -> str:
    return f"import distdiag.cli; sys.exit(distdiag.cli.main({[str(a) for a in args]!r}))"


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["nonsense"]], ids=" ".join)
def test_help_imports_nothing_heavy(tmp_path: Path, args: list[str]) -> None:
    loaded = imported(command(*args), tmp_path, expect=2 if args == ["nonsense"] else 0)
    assert loaded & (HEAVY | OURS) == set()


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_a_command_imports_no_library(tmp_path: Path, name: str) -> None:
    loaded = imported(command(name, "--help"), tmp_path)
    assert loaded & HEAVY == set()


def test_attach_can_be_imported_without_torch(tmp_path: Path) -> None:
    assert imported("import distdiag; distdiag.attach", tmp_path) & (HEAVY | OURS) == set()


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("distdiag.monitor", set()),
        ("distdiag.monitor.__main__", {"pynvml", "prometheus_client"}),
        ("distdiag.store.writer", set()),
        ("distdiag.store.reader", set()),
        ("distdiag.diagnosis.model.findings", set()),
        ("distdiag.diagnosis.model.snapshot", set()),
        ("distdiag.report.text", {"numpy"}),
        ("distdiag.report.perfetto", {"numpy"}),
        ("distdiag.doctor.host", set()),
    ],
)
def test_modules_outside_the_ranks_import_no_torch(tmp_path: Path, module: str, allowed: set[str]) -> None:
    assert imported(f"import {module}", tmp_path) & HEAVY <= allowed


def test_the_recorder_imports_no_reader(tmp_path: Path) -> None:
    loaded = imported("import distdiag.recorder, distdiag.run", tmp_path)
    readers = {"distdiag.tui", "distdiag.report", "distdiag.cli", "pandas", "textual", "matplotlib", "jinja2"}
    assert loaded & readers == set()


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        (["diagnose"], set()),
        (["diagnose", "--json"], set()),
        (["tui", "--once"], {"textual", "rich", "numpy"}),
        (["report", "--format", "text"], {"numpy"}),
        (["report", "--format", "json"], {"numpy"}),
        (["report", "--format", "perfetto", "-o", "-"], {"numpy"}),
        (["report", "-o", "-"], {"numpy", "matplotlib", "jinja2"}),
        (["compare", "--json"], {"numpy"}),
        (["skill"], set()),
        (["config"], set()),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_readers_import_no_torch(tmp_path: Path, args: list[str], allowed: set[str]) -> None:
    run = make_run(tmp_path / "run", ranks=2, steps=30, findings=(DEADLOCK,))
    name, *options = args
    runs = {"compare": [run, run], "skill": [], "config": []}.get(name, [run])
    loaded = imported(command(name, *runs, *options), tmp_path, expect=1 if name == "diagnose" else 0)
    assert loaded & HEAVY <= allowed
    assert loaded & {"distdiag.recorder", "distdiag.train", "distdiag.monitor"} == set()


def test_the_doctor_imports_torch_in_a_child_process_only(tmp_path: Path) -> None:
    assert imported(command("doctor", "--no-torch"), tmp_path, expect=None) & HEAVY <= {"pynvml"}


def test_the_diagnosis_opens_no_file_and_asks_no_clock() -> None:
    """ARCHITECTURE.md: it gets snapshots and a function that returns source lines, and nothing else."""
    world = {"pathlib", "io", "subprocess", "time", "datetime", "random", "socket", "tempfile", "shutil", "threading"}
    found = []
    for path in (REPOSITORY / "distdiag/diagnosis").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            found += [f"{path.name}: {name}" for name in (*names, called) if name in world or name == "open"]
    assert found == []
