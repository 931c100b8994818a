"""The fast part of the fault collection, through the runner of `distdiag bench faults`: real jobs, right diagnoses."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.cli._fault_jobs import Job, load
from distdiag.cli._scorecard import run_job

FOLDER = Path(__file__).resolve().parents[1] / "faults"
JOBS = [j for j in load(FOLDER / "manifest.json").jobs if "ci" in j.subsets]


@pytest.mark.job
@pytest.mark.parametrize("job", JOBS, ids=lambda j: j.name)
def test_diagnosis(job: Job) -> None:
    s = run_job(job, FOLDER)
    assert s.problem is None
    assert s.false_findings == []
    if job.faulty:
        assert (s.found, s.right_cause is not False, s.right_culprits) == (True, True, True), (s.expected, s.findings)
        assert s.lines_right == s.lines_expected, s.findings
