"""FSDP2: ranks that share one sharded model train it together, so their batches are compared."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.jobs import closed, launch, rows

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

SCRIPT = """
    import time
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(15, 33), torch.nn.ReLU(), torch.nn.Linear(33, 7))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = TensorDataset(torch.randn(960, 15), torch.randint(0, 7, (960,)))
    loader = DataLoader(data, 8, SAMPLER)
    for epoch in range(2):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(0.01)  # so that the monitor sees each epoch
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("sampler", "found"),
    [("shuffle=True", ["duplicate_data"]), ("sampler=DistributedSampler(data)", [])],
    ids=["no sampler", "distributed"],
)
def test_batches_of_a_sharded_model_are_compared(sampler: str, found: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("SAMPLER", sampler))
    run = tmp_path / "R"
    with launch(["-m", "distdiag.run", "--run-dir", run, script], nproc=2, cwd=tmp_path, fork_ranks=True) as job:
        assert job.wait(120) == 0
        closed(run)  # the end of the job kills its monitor
    findings = (json.loads(text) for (text,) in rows(run, "SELECT json FROM finding"))
    assert [f["kind"] for f in findings if f["severity"] != "info" and f["kind"] == "duplicate_data"] == found
    (checks,) = (json.loads(text) for (text,) in rows(run, "SELECT value FROM meta WHERE key = 'checks'"))
    assert {c["kind"]: c["checked"] for c in checks if not c.get("cause")}["duplicate_data"]
