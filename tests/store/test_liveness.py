"""What readers say of a monitor that failed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from distdiag import procfs
from distdiag.page import directories
from distdiag.store.liveness import failure_of
from distdiag.store.opening import RunUnreadable
from distdiag.store.reader import open_run

TRACEBACK = "Traceback (most recent call last):\n  File 'loop.py', line 1\n"


@pytest.mark.parametrize(
    ("log", "failure"),
    [
        (TRACEBACK + "sqlite3.OperationalError: disk I/O error\n", "sqlite3.OperationalError: disk I/O error"),
        ("x" * 9000 + "\n" + TRACEBACK + "OSError\n\n", "OSError"),
        (TRACEBACK + "ValueError: \x1b[2J\n", "ValueError: \\x1b[2J"),
        ("Fatal Python error: Segmentation fault\n", None),
        ("", None),
    ],
)
def test_the_last_line_of_the_monitors_log_is_its_failure(tmp_path: Path, log: str, failure: str | None) -> None:
    (tmp_path / "monitor.log").write_text(log)
    assert failure_of(tmp_path) == failure


def test_without_a_log_no_failure_is_known(tmp_path: Path) -> None:
    assert failure_of(tmp_path) is None
    (tmp_path / "monitor.log").mkdir()
    assert failure_of(tmp_path) is None


@pytest.mark.parametrize("created", [True, False])
def test_a_job_that_ended_on_a_full_disk_is_not_just_starting(tmp_path: Path, created: bool) -> None:
    """Nothing could be written: the database is empty or missing, and the pages are gone with the ranks."""
    run = tmp_path / "run"
    run.mkdir()
    pages = directories.overflow(run, 0)
    directories.make(pages)
    launcher = f"{os.getpid()}:{procfs.start_ticks(os.getpid())}"
    directories.node_record(run, 0).write_text(f"{socket.gethostname()}:{launcher} {pages}\n")
    if created:
        (run / "run.db").touch()
    with pytest.raises(RunUnreadable, match=r"so far|yet") as starting:
        open_run(run)
    assert "starting" in starting.value.hint
    assert directories.remove(pages)
    directories.node_record(run, 0).write_text(f"{socket.gethostname()}:1:1 {pages}\n")
    (run / "monitor.log").write_text(TRACEBACK + "OSError: [Errno 28] No space left on device\n")
    with pytest.raises(RunUnreadable, match=r"the job has ended.*No space left") as ended:
        open_run(run)
    assert "starting" not in ended.value.hint
