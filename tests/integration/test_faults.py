"""The fast part of the fault collection: real jobs, expected findings, scored by `distdiag bench faults`.

Only the start of the jobs is faster: it is forked, see tests/launchers.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.errors import ExitCode
from tests.faults.collection import Job, load
from tests.faults.scorecard import run_job
from tests.jobs import TEST_MARK, kill_marked, marked, wait_for

FOLDER = Path(__file__).resolve().parents[1] / "faults"
JOBS = [j for j in load(FOLDER / "manifest.json").jobs if "ci" in j.subsets]


@pytest.mark.job
@pytest.mark.parametrize("job", JOBS, ids=lambda j: j.name)
def test_a_job_of_the_collection_gets_its_expected_finding(job: Job) -> None:
    s = run_job(job, FOLDER)
    assert s.problem is None
    assert s.false_findings == []
    if job.faulty:
        assert (s.found, s.right_cause is not False, s.right_culprits) == (True, True, True), (s.expected, s.findings)
        assert s.lines_right == s.lines_expected, s.findings


@pytest.mark.job
def test_a_killed_bench_ends_its_jobs(tmp_path: Path) -> None:
    """Jobs and their monitors are in their own sessions, which no signal to the bench reaches."""
    args = [
        sys.executable,
        "-m",
        "distdiag",
        "bench",
        "faults",
        "--only",
        "rate_limited",
        "--keep",
        str(tmp_path / "k"),
    ]
    bench = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        mark = os.environ[TEST_MARK]
        wait_for(lambda: any("distdiag.monitor" in c for c in marked(mark).values()), 90.0, "the job's monitor")
        bench.send_signal(signal.SIGTERM)
        _, output = bench.communicate(timeout=30.0)
        left = marked(mark)
    finally:
        kill_marked(mark)
    assert bench.returncode == ExitCode.INTERRUPTED
    assert b"Traceback" not in output
    assert left == {}
