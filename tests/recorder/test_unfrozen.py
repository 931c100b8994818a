"""Parameters that were frozen when DDP was built and are trained later: reported, unless the module is wrapped again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import launch, rows

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

JOB = """
import sys
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
old = ddp = DDP(net)  # kept: what it has left out is still known
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(40):
    if step == 10:
        net[0].requires_grad_(True)
        if "again" in sys.argv:
            ddp = DDP(net)
    ddp(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("case", ["late", "again"])
def test_parameters_that_are_unfrozen_after_wrapping(case: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(JOB)
    with launch(["-m", "distdiag.run", "--run-dir", "R", "net.py", case], nproc=2, cwd=tmp_path) as job:
        assert job.wait() == 0, job.tail()
    found = [json.loads(x) for (x,) in rows(tmp_path / "R", "select json from finding")]
    drift = [f for f in found if f["kind"] == "replica_drift"]
    assert len(drift) == (case == "late"), found
    for f in drift:
        assert f["names"] == ["0.weight"] and f["where"][0]["line"] == 9
        assert "2 parameters (0.weight, …) had requires_grad False when DDP was built" in f["message"]
