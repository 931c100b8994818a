"""`distdiag demo`: two real ranks hang, the verdict is printed, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import distdiag

pytestmark = [pytest.mark.job, pytest.mark.timeout(200)]


def test_the_demo_explains_its_hang_and_ends_it(tmp_path: Path) -> None:
    shown = distdiag("demo", "--run-dir", "run", cwd=tmp_path, timeout=150)
    assert shown.returncode == 0, shown.stderr
    verdict = next(line for line in shown.stdout.splitlines() if "ERROR deadlock" in line)
    assert "rank 0 is in broadcast" in verdict and "`if rank == 0:`" in verdict
    assert "Traceback" not in shown.stdout + shown.stderr
    again = distdiag("diagnose", "run", cwd=tmp_path)
    assert again.returncode == 1 and "`if rank == 0:`" in again.stdout
    refused = distdiag("demo", "--run-dir", "run", cwd=tmp_path)
    assert refused.returncode == 2 and "has a run already" in refused.stderr
