"""Steps that one rank makes before the ranks train together: they are compared by their numbers from then on."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.jobs import launch, rows, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

SCRIPT = """
    import torch
    import torch.distributed as dist

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    dist.init_process_group("gloo")
    rank, net = dist.get_rank(), torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    if rank == 0:
        train(net, optimizer, 9)  # and rank 1 has another state of the optimizer than this one
    train(torch.nn.parallel.DistributedDataParallel(net), optimizer, 50)
    dist.destroy_process_group()
"""


def test_a_rank_that_has_trained_alone_before_is_compared_with_the_others(tmp_path: Path) -> None:
    script, run = tmp_path / "train.py", tmp_path / "R"
    script.write_text(textwrap.dedent(SCRIPT))
    with launch(["-m", "distdiag.run", "--run-dir", run, script], cwd=tmp_path, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")
    ((cause, message),) = rows(run, "SELECT cause, message FROM finding WHERE kind = 'replica_drift'")
    assert cause == "update" and "(41 on rank 0; 32 on rank 1)" in message
    steps = rows(run, "SELECT rank, count(*) FROM step GROUP BY rank ORDER BY rank")
    assert steps == [(0, 50), (1, 50)]
