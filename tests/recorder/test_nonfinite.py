"""A non-finite value only ruins a training if a step uses it."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distdiag.page.layout import SampleKind
from distdiag.recorder import unseen
from distdiag.recorder.hooks.nonfinite import NonFinite
from tests.jobs import closed, launch, rows, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

SCRIPT = """
import time, torch
w = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([w], 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 40, enabled=SCALES)
for step in range(40):
    half = SCALES and step < 12
    loss = (w.half() * w.half()).sum().float() if half else (w * w).sum()
    if step in NAN:
        loss = loss * float("nan")
    if not SCALES and 12 <= step < 26:
        loss = loss + float("inf")  # its gradients are finite
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if step in DROPPED:
        continue
    scaler.step(optimizer)
    scaler.update()
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("nan", "dropped", "scales", "steps"),
    [
        # the batch of step 10 is dropped, the losses of 12 to 25 are inf with finite gradients, the batch of 30 is used
        ("[10, 30]", "[10]", False, range(30, 31)),
        # a scaler drops the first steps until its scale fits; from 20 on it drops them all
        ("range(20, 40)", "[]", True, range(2, 21)),
        # four in turn with good ones
        ("[3, 5, 7, 9]", "[3, 5, 7, 9]", False, range(7, 8)),
    ],
    ids=["dropped by hand", "dropped by a scaler", "dropped again and again"],
)
def test_a_nonfinite_loss_is_reported_once_a_step_uses_it_or_steps_stop(
    nan: str, dropped: str, scales: bool, steps: range, tmp_path: Path
) -> None:
    script, run = tmp_path / "script.py", tmp_path / "R"
    script.write_text(f"NAN, DROPPED, SCALES = {nan}, {dropped}, {scales}\n{SCRIPT}")
    with launch(["-m", "distdiag.run", "--run-dir", "R", script], 1, cwd=tmp_path, timeout=60, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        closed(run)
        kept = wait_for(lambda: rows(run, "SELECT json FROM finding WHERE kind = 'nonfinite'"), 10, "a finding")
    found = [json.loads(j) for (j,) in kept]
    assert [f["cause"] for f in found] == ["loss"] and found[0]["step"] in steps


SHARED_IN_FORWARD = """
import torch, torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x):
        mean = all_reduce(x.mean(0)) / dist.get_world_size()
        return self.layer(x - mean * SCALE[dist.get_rank()])

dist.init_process_group("gloo")
rank = dist.get_rank()
data = torch.randn(64 * 4, 8)
if rank == 1:
    data[BAD] = float("nan")
model = DistributedDataParallel(Centred())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for i, x in enumerate(DataLoader(data, 4) if LOADER else data.split(4)):
    if DIVIDED and (rank, i) == (1, 20):
        x = (x - x) / 0.0  # as by the deviation of a sensor that gives one value
    wide = torch.cat([x, x], 1)
    loss = (model(x) if LOADER else model(wide[:, :8])).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("given", "culprits"),
    [
        ("82, [1.0, 1.0], 0, 1", [1]),  # one sample of batch 20: its NaN reaches all ranks before any loss is read
        ("slice(0), [float('nan')] * 2, 0, 1", []),  # not in the data
        ("slice(0), [1.0, 1.0], 1, 1", [1]),
        ("slice(0), [1.0, 1.0], 1, 0", [1]),
    ],
    ids=["in a batch", "made in forward", "made of a batch", "in a view, without a loader"],
)
def test_the_rank_with_nan_in_its_batch_is_named(given: str, culprits: list[int], tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", tmp_path / "R"
    script.write_text(f"BAD, SCALE, DIVIDED, LOADER = {given}\n{SHARED_IN_FORWARD}")
    with launch(
        ["-m", "distdiag.run", "--run-dir", "R", str(script)], cwd=tmp_path, timeout=60, fork_ranks=True
    ) as job:
        assert job.wait() == 0, job.tail()
        closed(run)
    [finding] = [json.loads(j) for (j,) in rows(run, "SELECT json FROM finding WHERE kind = 'nonfinite'")]
    assert (finding["cause"], finding["culprits"]) == ("loss", culprits)
    assert ("what enters the model already has NaN" in finding["message"]) is bool(culprits)


def test_the_parameter_whose_gradient_is_checked_is_that_of_now_and_not_kept() -> None:
    unseen.install()  # else no tensor has memory that may be read
    written: list[SampleKind] = []
    of_rank: Any = SimpleNamespace(header=None, models={}, write=lambda kind, *_, **__: written.append(kind))
    checks, w = NonFinite(of_rank, of_rank, of_rank), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], 0.01)
    checks._check_gradient(optimizer, 1)
    held, w = weakref.ref(w), torch.nn.Parameter(torch.ones(2))
    optimizer.param_groups[0]["params"][0] = w
    gc.collect()
    assert held() is None
    w.grad = torch.full((2,), float("nan"))
    checks._check_gradient(optimizer, 2)
    assert written == [SampleKind.NONFINITE_GRADIENT]
