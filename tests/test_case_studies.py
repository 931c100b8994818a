"""The stored runs of examples/cases: small, right, and readable by every command; what they are recorded from still hangs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from distdiag import open_run
from tests.jobs import REPOSITORY, closed, distdiag, launch

TOOL = runpy.run_path(str(REPOSITORY / "tools" / "case_studies.py"))
CASES: list[Any] = TOOL["cases"]()
LINES = range(20, 61)
MOST_BYTES, MOST_OF_ALL = 300_000, 2 << 20


def names(run: Path) -> list[str]:
    with open_run(run) as opened:
        return [f.kind for f in opened.report().findings if f.cleared_s is None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stored_run_has_its_finding_and_the_fix_has_none(case: Any) -> None:
    assert names(case.run()) == [case.kind]
    assert names(case.run(fixed=True)) == []
    assert len(case.script.read_text().splitlines()) in LINES
    compile(case.fixed_source(), case.script.name, "exec")
    assert (REPOSITORY / "docs" / "pictures" / "cases" / f"{case.name}.svg").exists()


def test_stored_runs_are_small_and_name_no_checkout() -> None:
    stored = [*(REPOSITORY / "examples" / "cases").rglob("run.db")]
    assert len(stored) == 2 * len(CASES) >= 20
    sizes = [path.stat().st_size for path in stored]
    assert max(sizes) < MOST_BYTES and sum(sizes) < MOST_OF_ALL
    assert not [path for path in stored if str(REPOSITORY).encode() in path.read_bytes()]


def test_every_reader_opens_a_stored_run(tmp_path: Path) -> None:
    run = REPOSITORY / "examples" / "cases" / "dcp_best"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    report = tmp_path / "report.html"
    for command in (["diagnose"], ["tui", "--once"], ["report", "--output", str(report)]):
        done = distdiag(*command, str(run), cwd=tmp_path)
        assert done.returncode in (0, 1) and "dcp_best.py" in (
            report.read_text() if report.exists() else done.stdout
        ), done
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.mark.job
@pytest.mark.parametrize("name", ["lightning_log_dir", "trainer_lengths"])
@pytest.mark.parametrize("fixed", [False, True], ids=["bug", "fixed"])
def test_a_case_can_be_recorded_again(name: str, fixed: bool, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == name]
    (tmp_path / case.script.name).write_text(case.fixed_source() if fixed else case.script.read_text())
    command = ["-m", "distdiag.run", "--run-dir", "R", case.script.name]
    with launch(command, cwd=tmp_path, env={"DISTDIAG_END_HANGS_S": "1"}, fork_ranks=True) as job:
        assert (job.wait() == 0) == fixed, job.tail()
        closed(tmp_path / "R")
    found = names(tmp_path / "R")
    assert (case.kind in found) == (not fixed)
    assert not fixed or set(found) <= {"comm_bound"}  # two ranks on busy cores
