"""`distdiag demo`: two real ranks hang, the verdict is printed, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY, distdiag, marked, start, unwrapped, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(200)]


def printed(text: str) -> list[str]:
    """Return the lines that the monitor printed, joined, without folders and numbers that differ from run to run."""
    lines = [line for line in unwrapped(text).splitlines() if line.startswith("[distdiag]")]
    return [re.sub(r"#[\d,]+", "#", re.sub(r"\S*/", "", line)) for line in lines]


def test_the_demo_explains_its_hang_and_ends_it(tmp_path: Path) -> None:
    shown = distdiag("demo", "--run-dir", "run", cwd=tmp_path, timeout=150)
    assert shown.returncode == 0, shown.stderr
    page = (REPOSITORY / "docs/howto/hang.md").read_text()
    assert printed(shown.stdout) == printed(page), "docs/howto/hang.md shows what is printed"
    assert "Traceback" not in shown.stdout + shown.stderr
    again = distdiag("diagnose", "run", cwd=tmp_path)
    assert again.returncode == 1 and "`if rank == 0`" in again.stdout
    refused = distdiag("demo", "--run-dir", "run", cwd=tmp_path)
    assert refused.returncode == 2 and "has a run already" in refused.stderr


def test_a_terminated_demo_leaves_nothing_running(tmp_path: Path) -> None:
    with start([sys.executable, "-m", "distdiag", "demo", "--run-dir", "run"], cwd=tmp_path) as job:
        wait_for(lambda: "demo_job" in str(marked(job.mark)), 60, "the launcher", job)
        os.kill(job.process.pid, signal.SIGTERM)
        os.kill(job.process.pid, signal.SIGHUP)
        assert job.wait(40) in (
            128 + signal.SIGTERM,
            128 + signal.SIGHUP,
        )  # Python runs the lower one first if both wait
        wait_for(lambda: not marked(job.mark), 40, "the end of all")
