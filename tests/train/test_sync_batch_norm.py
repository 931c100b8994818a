"""SyncBatchNorm on CPU: outputs, gradients and running statistics of one process over the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from distdiag.train.sync_batch_norm import SyncBatchNorm2d, convert_sync_batch_norm
from tests.jobs import launch


@pytest.mark.job
def test_two_ranks_equal_one_process() -> None:
    with launch([Path(__file__).with_name("sync_batch_norm_job.py")], nproc=2, timeout=150, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        assert sorted(job.stdout().split("\n")[:2]) == ["rank 0 equal", "rank 1 equal"]


def test_conversion_keeps_state_and_leaves_other_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4, momentum=0.3)), nn.BatchNorm1d(7))
    model.load_state_dict({k: torch.full_like(v, 3) for k, v in model.state_dict().items()})
    before = {k: v.clone() for k, v in model.state_dict().items()}
    converted = convert_sync_batch_norm(model.eval(), torch.device("cpu"))
    layer = converted[1][0]
    assert type(layer) is SyncBatchNorm2d
    assert (layer.momentum, layer.training) == (0.3, False)
    assert type(converted[2]) is nn.BatchNorm1d
    assert all(torch.equal(v, before[k]) for k, v in converted.state_dict().items())
    with torch.no_grad():  # in eval no process group is needed
        converted[0:2](torch.randn(2, 3, 5, 5))
