"""The check of the last gradient, for tensors of several kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import closed, launch, rows

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
for options in ({"sparse": True}, {"dtype": torch.bfloat16}, {}):
    first, last = torch.nn.Embedding(16, 4, **options), torch.nn.Linear(12, 2, dtype=options.get("dtype"))
    model = DistributedDataParallel(torch.nn.Sequential(first, torch.nn.Flatten(), last))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.randint(0, 16, (4, 3))).float().pow(2).mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""


def test_sparse_bfloat16_and_plain_gradients_are_read_without_a_failure(tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", tmp_path / "R"
    script.write_text(SCRIPT)
    with launch(
        ["-m", "distdiag.run", "--run-dir", "R", str(script)], cwd=tmp_path, timeout=60, fork_ranks=True
    ) as job:
        assert job.wait() == 0, job.tail()
        closed(run)
    found = [json.loads(j) for (j,) in rows(run, "SELECT json FROM finding")]
    assert [f["cause"] for f in found if f["kind"] == "recorder" and f["cause"] != "clock_skew"] == []
    assert rows(run, "SELECT max(step) FROM step") == [(60,)]
