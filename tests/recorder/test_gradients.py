"""What is looked at of the gradient that comes last, where it is no plain tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import launch, rows, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(FIRST, torch.nn.Flatten(), torch.nn.Linear(12, 2, dtype=DTYPE)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randint(0, 16, (4, 3))).float().pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "first",
    [
        "torch.nn.Embedding(16, 4, sparse=True)",
        "torch.nn.Embedding(16, 4, dtype=torch.bfloat16)",
        "torch.nn.Embedding(16, 4)",
    ],
    ids=["sparse", "bfloat16", "plain"],
)
def test_gradients_of_any_kind_are_looked_at_without_a_failure(first: str, tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", tmp_path / "R"
    dtype = "torch.bfloat16" if "bfloat16" in first else "torch.float32"
    script.write_text(SCRIPT.replace("FIRST", first).replace("DTYPE", dtype))
    with launch(["-m", "distdiag.run", "--run-dir", "R", str(script)], cwd=tmp_path, timeout=60) as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: rows(run, "SELECT 1 FROM meta WHERE key = 'ended_s'"), 30, "the monitor to close the run")
    found = [json.loads(j) for (j,) in rows(run, "SELECT json FROM finding")]
    assert [f["kind"] for f in found if f["kind"] == "recorder"] == []
    assert rows(run, "SELECT max(step) FROM step") == [(20,)]
