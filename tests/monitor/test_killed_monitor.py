"""A killed monitor: a rank starts another; if no rank is left, `diagnose` does, and the verdict is complete."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.jobs import ONE_RANK, TEST_MARK, Job, distdiag, marked, rows, start, wait_for

pytestmark = pytest.mark.job

RANK = """
import sys, time
from pathlib import Path
import distdiag
run = distdiag.attach()
for step in range(4000):
    run.step()
    time.sleep(0.05)
    if Path("end").exists():
        break
"""


@contextmanager
def two_ranks(tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    """Two recorded processes of one job, without torch, in `tmp_path`."""
    (tmp_path / "job.py").write_text(RANK)
    with ExitStack() as stack:
        env = {**ONE_RANK, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29511", "DISTDIAG_RUN_DIR": "R"}
        jobs = [
            stack.enter_context(start([sys.executable, "job.py"], cwd=tmp_path, env={**env, "RANK": str(q), "LOCAL_RANK": str(q)}))
            for q in (0, 1)
        ]  # fmt: skip
        wait_for(
            lambda: rows(tmp_path / "R", "SELECT rank FROM rank WHERE life = 'starting'") == [(0,), (1,)],
            60,
            "both ranks",
        )
        yield jobs[0], jobs[1]


def monitors(*jobs: Job) -> list[int]:
    return [pid for job in jobs for pid in job.monitor_pids()]


def writer(tmp_path: Path) -> int | None:
    """Return the process that writes the run's database."""
    found = rows(tmp_path / "R", "SELECT value FROM meta WHERE key = 'monitor_pid'")
    return int(found[0][0]) if found else None


def verdict(tmp_path: Path) -> tuple[int, dict]:
    done = distdiag("diagnose", "R", "--json", cwd=tmp_path)
    return done.returncode, json.loads(done.stdout)


def test_a_rank_replaces_a_killed_monitor_which_closes_the_run(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as jobs:
        (first,) = monitors(*jobs)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: writer(tmp_path) not in (None, first), 60, "another monitor")
        (tmp_path / "end").touch()
        assert [job.wait() for job in jobs] == [0, 0]
        wait_for(lambda: rows(tmp_path / "R", "SELECT value FROM meta WHERE key = 'monitor_ended'") == [("1",)], 30)
    code, found = verdict(tmp_path)
    assert (code, found["state"], found["ranks_seen"]) == (0, "ended", 2), found
    assert not (tmp_path / "R" / "attempt_1").exists()


def test_a_reader_judges_a_job_that_was_killed_with_its_monitor(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as jobs:
        for pid in (*monitors(*jobs), jobs[0].process.pid, jobs[1].process.pid):
            os.kill(pid, signal.SIGKILL)
        for job in jobs:
            job.wait()
        code, found = verdict(tmp_path)
    assert code == 1 and found["state"] == "failed", found
    assert found["ranks_seen"] == 2 and found["unjudged"] is None
    # the reader's monitor still writes its last rows after the reader has its answer
    wait_for(lambda: not marked(os.environ[TEST_MARK]), 30, "the reader's monitor to end")


WAITS_FOR_ALL = """
import ctypes, os, sys, time
from pathlib import Path
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
import distdiag
run = distdiag.attach()
while not Path("R/run.db").exists():
    time.sleep(0.05)
quick = [os.fork() or os._exit(3) for _ in range(2)]
ended = []
try:
    while True:
        ended.append(os.wait()[0])
except ChildProcessError:
    print(set(quick) <= set(ended), len(ended) - len(quick), flush=True)
while not Path("end").exists():
    time.sleep(0.05)
"""


def test_a_rank_that_waits_until_it_has_no_child_left_goes_on(tmp_path: Path) -> None:
    """The monitor is a child of a rank that is a subreaper, as process 1 of a container is: it ends, and the rank starts another."""
    (tmp_path / "job.py").write_text(WAITS_FOR_ALL)
    env = {**ONE_RANK, "DISTDIAG_RUN_DIR": "R"}
    with start([sys.executable, "job.py"], cwd=tmp_path, env=env, timeout=60) as job:
        wait_for(job.stdout, 30, "the rank to have waited", job)
        assert job.stdout() == "True 1\n"
        note = "SELECT text FROM event WHERE text LIKE 'the monitor ended: rank 0%'"
        wait_for(lambda: len(rows(tmp_path / "R", note)) == 1 and job.monitor_pids(), 30, "another monitor", job)
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.tail()
        wait_for(lambda: not job.monitor_pids(), 30, "the monitor to end")
    code, found = verdict(tmp_path)
    assert (code, found["state"], found["ranks_seen"]) == (0, "ended", 1), found
