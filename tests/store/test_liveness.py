"""What readers say of a monitor that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.store.liveness import failure_of

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
