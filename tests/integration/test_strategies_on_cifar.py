"""Strategies on the real CIFAR-10: recorded without a finding; those whose ranks hold parts of the model are also resumed.

ddp on the same data is in test_main_job.py, its resume in tests/train/test_job.py. tests/train/test_strategies.py checks every
strategy's mathematics, and that a resumed run ends equal.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import closed, launch, rows, shared

pytestmark = [pytest.mark.job, pytest.mark.timeout(600)]

# other kinds judge speed or the host, and may be correct on a busy machine
OF_THE_JOB = {
    "deadlock", "mismatch", "timeout", "rank_lost", "unused_parameters", "uneven_batches", "duplicate_data",
    "group_misuse", "replica_drift", "nonfinite",
}  # fmt: skip


def close(a: Any, b: Any, where: str = "") -> None:
    """Assert that two checkpoints have the same numbers; a kernel may add in another order at another address."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text: f"{where}: {text}")
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            close(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, f"{where}/{i}")
    else:
        assert a == b, where


@pytest.mark.parametrize("strategy", ["single", "dp", "model", "fsdp", "pipeline"])
def test_a_strategy_trains_without_a_finding_and_resumes_to_the_same_result(strategy: str, tmp_path: Path) -> None:
    data = shared("cifar-10-batches-py")
    nproc = 1 if strategy in ("single", "dp") else 2
    options = ["-m", "distdiag.train", "--strategy", strategy, "--data", data, "--batch-size", "16", "--amp", "off"]
    options += ["--max-steps", "12", "--log-every", "4", "--checkpoint-every", "6", "--validate-every", "0"]
    recorded = ["--monitor", "--run-dir", tmp_path / "R"]
    with launch(
        [*options, *recorded, "--checkpoint-dir", tmp_path / "a"], nproc=nproc, timeout=280, fork_ranks=True
    ) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "R")
        losses = [float(x) for x in re.findall(r"step \d+/12  loss ([\d.]+)", job.stdout())]
    assert len(losses) == 3 and all(0 < loss < 10 for loss in losses)
    found = [json.loads(text) for (text,) in rows(tmp_path / "R", "SELECT json FROM finding")]
    assert [f for f in found if f["kind"] in OF_THE_JOB or f["severity"] == "error"] == []
    steps = rows(tmp_path / "R", "SELECT rank, max(step) FROM step GROUP BY rank")
    assert [rank for rank, _ in steps] == list(range(nproc))

    if strategy not in ("fsdp", "pipeline"):  # the only strategies whose checkpoint is assembled from all ranks
        return
    resumed = ["--resume", tmp_path / "a" / "step-00000006.pt", "--checkpoint-dir", tmp_path / "b"]
    with launch([*options, *resumed], nproc=nproc, timeout=280, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
    ends = [torch.load(tmp_path / name / "step-00000012.pt", weights_only=True) for name in ("a", "b")]
    half = torch.load(tmp_path / "a" / "step-00000006.pt", weights_only=True)
    for key in ("model", "optimizer", "step"):
        close(ends[0][key], ends[1][key], key)
    with pytest.raises(AssertionError):
        close(half["model"], ends[0]["model"])
