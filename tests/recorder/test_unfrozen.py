"""Parameters that were frozen when DDP was built and are trained later are reported, unless the module is wrapped again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import closed, launch, rows

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

JOB = """
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
late = DDP(net)
other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
old = again = DDP(other)  # kept: what it has left out is still known
optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], 0.1)
for step in range(40):
    if step == 10:
        net[0].requires_grad_(True)
        other[1].requires_grad_(True)
        again = DDP(other)
    again(late(torch.randn(4, 8))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_parameters_that_are_unfrozen_are_reported_unless_wrapped_again(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(JOB)
    with launch(["-m", "distdiag.run", "--run-dir", "R", "net.py"], nproc=2, cwd=tmp_path, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "R")
    found = [json.loads(x) for (x,) in rows(tmp_path / "R", "select json from finding")]
    (drift,) = [f for f in found if f["kind"] == "replica_drift"]
    assert drift["names"] == ["0.weight"] and drift["where"][0]["line"] == 8
    assert "2 parameters (0.weight, …) had requires_grad False when DDP was built" in drift["message"]
