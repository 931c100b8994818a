"""Waits that no Python hook sees, or that have no number: DTensor's collectives, messages by their tag."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, launch, rows, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

SHARDED = """
    import sys, time
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()

    def norm_of_the_first():
        return model[0].weight.full_tensor().norm()

    if "late" in sys.argv:
        if rank == 1:
            time.sleep(3)
        norm_of_the_first()
    elif rank == 0:
        norm_of_the_first()
    dist.barrier()
    dist.destroy_process_group()
"""
# The server answers every worker in turn; tags distinguish the rounds.
BY_TAG = """
    import sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world, rounds = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
    wrong = rounds if "wrong" in sys.argv else -1
    gradient, weights = torch.ones(4), torch.zeros(4)

    def serve(step):
        for worker in range(1, world):
            dist.recv(gradient, worker, tag=step)
            weights.sub_(0.01 * gradient)
        for worker in range(1, world):
            dist.send(weights, worker, tag=step)

    def work(step):
        tag = step + 1 if step == wrong and rank == 1 else step
        dist.send(gradient, 0, tag=tag)
        dist.recv(weights, 0, tag=step)

    for step in range(1, rounds + 1):
        serve(step) if rank == 0 else work(step)
    dist.destroy_process_group()
"""


def job_of(tmp_path: Path, text: str) -> list[str | Path]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    return ["-m", "distdiag.run", "--run-dir", tmp_path / "R", script]


def line_of(tmp_path: Path, text: str) -> int:
    return next(i for i, line in enumerate((tmp_path / "train.py").read_text().splitlines(), 1) if text in line)


def findings(tmp_path: Path, where: str = "1") -> list[dict[str, Any]]:
    return [json.loads(text) for (text,) in rows(tmp_path / "R", f"SELECT json FROM finding WHERE {where}")]


def proved(tmp_path: Path, job: Job, deadline_s: float = 60) -> dict[str, Any]:
    certain = "severity = 'error' AND certainty = 'proved'"
    return wait_for(lambda: findings(tmp_path, certain), deadline_s, "a proof", job)[0]


def recorded(job: Job) -> None:
    wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")


# -- functional collectives ----------------------------------------------------------------------------------


def test_a_parameter_gathered_on_one_rank_only_is_a_deadlock(tmp_path: Path) -> None:
    with launch(job_of(tmp_path, SHARDED), nproc=3, cwd=tmp_path, fork_ranks=True) as job:
        found = proved(tmp_path, job)
    assert found["kind"] in ("deadlock", "mismatch") and found["culprits"] == [0]
    at = {(w["rank"], Path(w["file"]).name, w["line"]) for w in found["where"]}
    assert (0, "train.py", line_of(tmp_path, "full_tensor()")) in at


def test_a_parameter_gathered_late_on_one_rank_is_a_stall(tmp_path: Path) -> None:
    with launch([*job_of(tmp_path, SHARDED), "late"], nproc=2, cwd=tmp_path, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        recorded(job)
    assert findings(tmp_path, "severity != 'info'") == []


# -- messages whose tags rise --------------------------------------------------------------------------------


def test_a_wrong_tag_after_hundreds_of_messages_is_found(tmp_path: Path) -> None:
    with launch([*job_of(tmp_path, BY_TAG), "800", "wrong"], nproc=3, cwd=tmp_path, fork_ranks=True) as job:
        found = proved(tmp_path, job)
    assert found["kind"] == "deadlock"


def test_thousands_of_messages_are_no_finding(tmp_path: Path) -> None:
    """They may arrive faster than they are read: single times are then lost, which is not worth a finding."""
    with launch([*job_of(tmp_path, BY_TAG), "1500"], nproc=2, cwd=tmp_path, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        recorded(job)
    assert findings(tmp_path, "severity != 'info' OR kind = 'recorder'") == []
