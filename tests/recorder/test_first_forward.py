"""Why a parameter got no gradient: its module was never called or had gradients off, or its output does not reach the loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.jobs import ONE_RANK, closed, launch, rows, start

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

JOB = """
import sys
import torch
from torch import distributed as dist, nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.aside, self.spare = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = self.fixed(self.body(x))
        if "aside" in sys.argv:
            self.aside(x)
        if "reentrant" in sys.argv:
            fixed = self.fixed(torch.ones(4, 8))  # needs no gradient
            x = x + checkpoint(lambda y: self.spare(self.aside(y)), fixed, use_reentrant=True)
        return x


torchs = nn.Module.__call__
dist.init_process_group("gloo")
net = Net()
if "aside" in sys.argv:
    del net.spare
if "compiled" in sys.argv:
    net.body = torch.compile(net.body, backend="eager")
ddp = DDP(net)
if "frozen" in sys.argv:
    net.aside.requires_grad_(False)
    net.spare.requires_grad_(False)
optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], 0.1)
try:
    for _ in range(3):
        ddp(torch.randn(4, 8)).sum().backward()
        assert not torch_module._global_forward_pre_hooks and nn.Module.__call__ is torchs
        optimizer.step()
        optimizer.zero_grad()
except RuntimeError as e:
    assert "finished reduction in the prior iteration" in str(e)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("never", "forward never called aside, spare"),
        ("aside", "their output does not reach the loss"),
        ("reentrant", "forward called their modules with gradients off, so their output has no graph"),
        ("frozen", "they were frozen (requires_grad False) after DDP was built"),
        ("compiled", ""),  # its guards would notice our hooks
    ],
)
def test_the_cause_of_a_missing_gradient_is_found(case: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(JOB)
    with launch(
        ["-m", "distdiag.run", "--run-dir", "R", "net.py", case], nproc=1, cwd=tmp_path, fork_ranks=True
    ) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "R")
    found = [json.loads(x) for (x,) in rows(tmp_path / "R", "select json from finding")]
    by_cause = {f["cause"]: f for f in found if f["kind"] == "unused_parameters"}
    assert set(by_cause) == {"never_used", "frozen"}
    message = by_cause["never_used"]["message"]
    assert ("use_reentrant=False" in by_cause["never_used"]["advice"]) is (case == "reentrant")
    assert says in message if says else "forward" not in message
    assert by_cause["frozen"]["severity"] == "info" and by_cause["frozen"]["names"] == ["fixed.weight", "fixed.bias"]


RAISES = """
import sys, traceback, warnings
import torch
from torch import distributed as dist, nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        warnings.warn("from here", stacklevel=4)
        return self.layer(x)


class Outer(Inner):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        try:
            return self.inner(x)
        except RuntimeError:
            traceback.print_exc()
            raise


model = Outer()
if sys.argv[1] == "in DDP":
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, check_reduction=True)  # torch warns
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    for step in range(3):
        width = 2 if step == 0 and sys.argv[1] == "alone" else 3  # what it calls is collected in the second step
        model(torch.ones(4, width)).sum().backward()
        optimizer.step()
except RuntimeError:
    traceback.print_exc()
    optimizer.step()
model(torch.ones(4, 2))
model(torch.ones(4, 3))
"""


@pytest.mark.parametrize("where", ["in DDP", "alone"])
def test_an_error_in_the_forward_looks_as_without_recording(where: str, tmp_path: Path) -> None:
    """While the modules are collected that the forward calls, too."""
    (tmp_path / "net.py").write_text(RAISES)
    shown = []
    for before in ([], ["-m", "distdiag.run", "--quiet", "--run-dir", "R"]):
        with start([sys.executable, *before, "net.py", where], cwd=tmp_path, env=ONE_RANK) as job:
            assert job.wait() == 1, job.tail()
            shown.append(job.stderr())
    assert shown[0] == shown[1] and shown[0].count("cannot be multiplied") >= 3 and "net.py:26: UserWarning" in shown[0]
