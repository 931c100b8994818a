"""The monitor of a rank without a stderr prints into none of its files: number 2 is taken before the first is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ONE_RANK, REPOSITORY, clean_env, closed, rows, start, wait_for

OPENED = """
import os
for fd in range({first}, 3):
    os.close(fd)
from distdiag.streams import open_closed
open_closed()
file = os.open("file", os.O_RDWR | os.O_CREAT)
os.write(2, b"a verdict")
assert file > 2 and os.fstat(file).st_size == 0
"""
LOCKED = """
import os, sys
from pathlib import Path
os.closerange(0, 3)
from distdiag.page import directories
from distdiag.recorder import start_monitor
pages, started = Path("pages").absolute(), []
directories.make(pages)
start_monitor._start = lambda *of: started.append(of[4])
assert start_monitor.start_monitor(Path("run"), pages, 0, pages)
os._exit(int(started[0] <= 2))
"""


@pytest.mark.parametrize(
    "code", [OPENED.format(first=0), OPENED.format(first=2), LOCKED], ids=["all", "stderr", "lock"]
)
def test_no_file_gets_the_number_of_stderr(code: str, tmp_path: Path) -> None:
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY)})
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, timeout=60, check=False).returncode == 0


@pytest.mark.job
@pytest.mark.timeout(180)
def test_a_job_without_a_stderr_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1)\nraise ValueError('no data')\n")
    command = f"{sys.executable} -m distdiag.run --run-dir R train.py 2>&-"
    env = clean_env(tmp_path / "home", {**ONE_RANK, "PYTHONPATH": str(REPOSITORY)})
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, timeout=120, check=False).returncode == 1
    closed(tmp_path / "R")
    wrote = {p.name for p in (tmp_path / "R").rglob("*") if p.is_file() and b"[distdiag]" in p.read_bytes()}
    assert wrote == {"verdict.txt"}


@pytest.mark.job
@pytest.mark.parametrize("quiet", [False, True])
def test_only_a_monitor_that_prints_holds_the_jobs_stderr_open(tmp_path: Path, quiet: bool) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "distdiag.run", *["--quiet"] * quiet, "--run-dir", "R", "train.py"]
    with start(command, cwd=tmp_path, env=ONE_RANK) as job:
        wait_for(lambda: rows(tmp_path / "R", "SELECT 1 FROM meta"), 60, "the monitor", job)
        (monitor,) = job.monitor_pids()
        assert (Path(f"/proc/{monitor}/fd/2").readlink() == Path("/dev/null")) is quiet
