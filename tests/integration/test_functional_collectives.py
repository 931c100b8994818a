"""Tensor parallelism: its collectives go from Python to C++ operators, past `ProcessGroup`, and are recorded all the same."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.jobs import launch, rows, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

SCRIPT = """
    import time
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def validate(model):
        with torch.no_grad():
            return model(torch.zeros(2, 16)).sum()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(90):
        if rank == 1:
            time.sleep(0.06)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        validate(model)
    dist.barrier()
    model(torch.zeros(8, 16))
"""


def test_tensor_parallel_collectives_have_lines_waits_and_times(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    source = script.read_text().splitlines()
    at = {text: next(i for i, line in enumerate(source, 1) if text in line) for text in ("return model", "sleep(")}

    def findings() -> dict[str, dict]:
        found = [json.loads(text) for (text,) in rows(tmp_path / "R", "SELECT json FROM finding")]
        return {f["kind"]: f for f in found if f["severity"] != "info"}

    with launch(
        ["-m", "distdiag.run", "--run-dir", tmp_path / "R", script], nproc=2, cwd=tmp_path, fork_ranks=True
    ) as job:
        stuck = ("mismatch", "deadlock")
        wait_for(lambda: set(findings()) & set(stuck), 120, "a finding about the validation on rank 0", job)
        found = findings()
    slow = found["straggler"]
    assert slow["culprits"] == [1] and slow["cost"].startswith("rank 0 loses")
    lonely = next(found[kind] for kind in stuck if kind in found)
    assert lonely["culprits"] == [0] and "`if rank == 0`" in lonely["message"]
    assert (0, at["return model"]) in {(w["rank"], w["line"]) for w in lonely["where"]}
    calls = rows(
        tmp_path / "R",
        "SELECT count(*), sum(duration_us IS NULL), max(bytes), sum(arrivals_us IS NOT NULL), avg(late_rank)"
        " FROM collective WHERE op = 'all_reduce' AND bytes = 512",
    )
    count, untimed, nbytes, with_arrivals, late = calls[0]
    assert count > 60 and untimed < count / 2 and nbytes == 8 * 16 * 4 and with_arrivals > 10
    assert late > 0.9, "rank 1 comes last"
    assert rows(tmp_path / "R", "SELECT sum(recorder_errors) FROM rank") == [(0,)]
