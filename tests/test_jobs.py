"""The test launcher keeps its promises."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from tests.jobs import JOB_MARK, launch, marked, runs, start, wait_for

DAEMON = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
sys.stdin.read()
"""


def test_all_processes_are_killed_even_outside_the_process_group() -> None:
    with start([sys.executable, "-c", DAEMON]) as job:
        wait_for(lambda: "started" in job.stdout(), 30, "the daemon", job)
        assert job.process.poll() is None, "stdin must stay open and silent"
        assert len(marked(job.mark)) == 2
    assert marked(job.mark) == {}
    assert job.process.returncode == -9


def test_jobs_get_a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTDIAG_RUN_DIR", "RANK", "MASTER_ADDR", "PYTHONPATH"):
        monkeypatch.setenv(name, "outer")
    with start([sys.executable, "-c", "import os; print(dict(os.environ))"], env={"DISTDIAG_DATA": "x"}) as job:
        assert job.wait() == 0
        seen = eval(job.stdout())
    assert seen["DISTDIAG_DATA"] == "x" and seen[JOB_MARK] == job.mark and seen["OMP_NUM_THREADS"] == "1"
    assert seen["HOME"] != os.environ.get("HOME")
    assert not {"DISTDIAG_RUN_DIR", "RANK", "MASTER_ADDR", "PYTHONPATH"} & set(seen)


def test_a_wait_that_times_out_shows_the_output() -> None:
    with (
        start([sys.executable, "-c", "print('last words')"]) as job,
        pytest.raises(AssertionError, match=r"(?s)the job ended first.*last words"),
    ):
        wait_for(lambda: None, 30, "never", job)


@pytest.mark.job
@pytest.mark.parametrize("forked", [False, True])
def test_ranks_are_found_by_number_and_killed(tmp_path: Path, forked: bool) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time
        open(f"pid.{os.environ['RANK']}", "w").write(str(os.getpid()))
        sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n")
        sys.stdout.flush()
        time.sleep(600)
        """)
    )
    with launch([script], nproc=2, cwd=tmp_path, fork_ranks=forked) as job:
        wait_for(lambda: job.stdout().count("of 2") == 2, 60, "both ranks to speak", job)
        pids = [job.rank_pid(rank) for rank in (0, 1)]
        assert pids == [int((tmp_path / f"pid.{rank}").read_text()) for rank in (0, 1)]
    assert marked(job.mark) == {} and not any(runs(pid) for pid in pids)
