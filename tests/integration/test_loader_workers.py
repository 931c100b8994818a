"""A rank waits for its DataLoader: the worker's line is reported, and the request harms no worker."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, launch, rows, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

DATASET = """
    import os, time
    import torch

    class Photos(torch.utils.data.Dataset):
        def __init__(self, rank):
            self.rank = rank

        def __len__(self):
            return 800

        def __getitem__(self, i):
            if self.rank == 1 and i >= 400:
                while not os.path.exists("mounted"):
                    time.sleep(0.02)
            return torch.full((8,), float(i))
"""
SCRIPT = """
    import os, time
    import torch
    import torch.distributed as dist
    from photos import Photos

    dist.init_process_group("gloo")
    photos = Photos(dist.get_rank())
    sampler = torch.utils.data.DistributedSampler(photos, shuffle=False)
    loader = torch.utils.data.DataLoader(photos, batch_size=4, sampler=sampler, num_workers=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    while not os.path.exists("seen"):
        time.sleep(0.05)
    dist.destroy_process_group()
"""


def waits_of(run_dir: Path) -> list[dict[str, Any]]:
    found = rows(run_dir, "SELECT json FROM finding WHERE kind = 'stall' AND cause = 'data'")
    return [json.loads(text) for (text,) in found]


def recorded(job: Job) -> None:
    wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")


def test_the_line_of_a_waiting_loader_worker_is_reported(tmp_path: Path) -> None:
    dataset, script, run = tmp_path / "photos.py", tmp_path / "train.py", tmp_path / "R"
    dataset.write_text(textwrap.dedent(DATASET))
    script.write_text(textwrap.dedent(SCRIPT))
    lines = dataset.read_text().splitlines()
    loop = next(i for i, line in enumerate(lines, 1) if "while not" in line)
    places = {(1, str(dataset), n) for n in (loop, loop + 1)}

    def named() -> dict[str, Any] | None:
        """Return the finding once it names the worker: it may be reported just before the worker answers."""
        return next((f for f in waits_of(run) if "data_worker" in {w["state"] for w in f["where"]}), None)

    with launch(["-m", "distdiag.run", "--run-dir", run, script], cwd=tmp_path, fork_ranks=True) as job:
        found = wait_for(named, 90, "the worker to be named", job)
        (tmp_path / "mounted").touch()
        wait_for(lambda: [f["cleared_s"] is not None for f in waits_of(run)] == [True], 60, "the end of the wait", job)
        (tmp_path / "seen").touch()
        assert job.wait() == 0, job.tail()  # a worker ended by a signal would have failed the rank
        recorded(job)
    assert found["culprits"] == [1]
    assert {(w["rank"], w["file"], w["line"]) for w in found["where"] if w["state"] == "data_worker"} <= places
    assert any(f"{dataset.name}:{n}" in found["message"] for _, _, n in places)
    steps = rows(run, "SELECT rank, count(*) FROM step GROUP BY rank ORDER BY rank")
    assert steps == [(0, 100), (1, 100)]
