"""A monitor whose process does not start: it is ended, and the rank's line names the reason, not the run directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from distdiag.page import directories
from distdiag.recorder import session, start_monitor, state
from distdiag.recorder.start_monitor import NotStarted
from distdiag.unpatched import Lock, start_new_thread
from tests.jobs import ONE_RANK, closed, runs, start, wait_for


def _pages(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    pages = tmp_path / "pages"
    directories.make(pages, tmp_path / "run")
    return pages


def test_a_process_that_does_not_get_going_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a debugger holds."""
    program, pids, spawn = tmp_path / "python", [], start_monitor.posix_spawn
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)

    def spawned(*args: Any, **kwargs: Any) -> int:
        pids.append(spawn(*args, **kwargs))
        return pids[0]

    monkeypatch.setattr(start_monitor, "_interpreter", lambda: str(program))
    monkeypatch.setattr(start_monitor, "posix_spawn", spawned)
    monkeypatch.setattr(start_monitor, "STARTED_S", 0.2)
    pages = _pages(tmp_path)
    with pytest.raises(NotStarted, match="did not start within"):
        start_monitor.start_monitor(tmp_path / "run", pages, 0, pages)
    wait_for(lambda: not runs(pids[0]), 10, "the process to end")


def test_a_monitor_blocks_no_signal_although_our_threads_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them starts another monitor when the first was killed."""
    program, mask, pages, done = tmp_path / "python", tmp_path / "mask", _pages(tmp_path), Lock()
    program.write_text(f"#!/bin/sh\nexec grep SigBlk /proc/self/status > {mask}\n")
    program.chmod(0o755)
    monkeypatch.setattr(start_monitor, "_interpreter", lambda: str(program))

    def run() -> None:
        try:
            start_monitor.start_monitor(tmp_path / "run", pages, 0, pages)
        finally:
            done.release()

    done.acquire()
    start_new_thread(run, ())
    assert done.acquire(timeout=20) and int(mask.read_text().split()[1], 16) == 0


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(13, "Permission denied", "reports"), "reports: Permission denied"),
        (None, "no process could be started"),
        (MemoryError(), "MemoryError"),
        (ValueError("a number is missing"), "a number is missing"),
    ],
)
def test_the_reason_is_named_and_the_hint_fits_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception | None,
    says: str,
) -> None:
    def fails(*_: object) -> None:
        if error is not None:
            raise error
        monkeypatch.setattr(start_monitor, "_interpreter", lambda: os.devnull)  # not executable
        pages = _pages(tmp_path)
        start_monitor.start_monitor(tmp_path / "run", pages, 0, pages)

    monkeypatch.setattr(session, "_start", fails)
    monkeypatch.setattr(state, "RAISE", False)
    assert session.start(None, None, 0, 1, 0) is None
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith(f"distdiag: this job is not recorded: {says}")
    assert ("--run-dir" in second) is isinstance(error, PermissionError) and second.endswith("the job itself continues")


@pytest.mark.job
def test_a_count_of_restarts_that_is_no_number_costs_no_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "distdiag.run", "--run-dir", "R", "train.py"]
    with start(command, cwd=tmp_path, env={**ONE_RANK, "TORCHELASTIC_RESTART_COUNT": "one"}) as job:
        assert job.wait() == 0 and "not recorded" not in job.stderr(), job.tail()
        closed(tmp_path / "R")
