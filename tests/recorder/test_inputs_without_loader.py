"""What counts as samples of a step; the inputs of a DDP module are recorded like a loader, if there is no loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import closed, launch, rows

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
made = (torch.randn(4, 8) for _ in range(30))
for x in DataLoader(torch.randn(120, 8), 4) if LOADER else made:
    model(x).sum().backward()
    optimizer.step()
with torch.no_grad():
    model(torch.randn(4, 8))
dist.destroy_process_group()
"""


def noted(folder: Path, seed: int, loader: bool) -> list[tuple[int | None, ...]]:
    """Return (length, batches, fingerprint) of each loader of a job of one rank."""
    folder.mkdir()
    (folder / "script.py").write_text(f"SEED, LOADER = {seed}, {loader}\n{SCRIPT}")
    command = ["-m", "distdiag.run", "--run-dir", "R", "script.py"]
    with launch(command, nproc=1, cwd=folder, timeout=60, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        closed(folder / "R")
    return rows(folder / "R", "SELECT length, batches, fingerprint FROM loader")


def test_batches_without_a_loader_are_distinguished_by_content(tmp_path: Path) -> None:
    [(length, batches, first)] = noted(tmp_path / "a", 1, loader=False)
    [(_, _, other)] = noted(tmp_path / "b", 2, loader=False)
    assert (length, batches) == (None, 30)  # evaluation alone is not training
    assert first and other and first != other


def test_inputs_are_not_recorded_if_a_loader_is(tmp_path: Path) -> None:
    [(length, batches, _)] = noted(tmp_path / "a", 1, loader=True)
    assert (length, batches) == (30, 30)


VALIDATED = """
def run(loader, train, before=None):
    for i, x in enumerate(loader):
        loss = model(x).sum() if train else model.module(x).sum()
        if train:
            loss.backward()
            optimizer.step()
        if before is not None and i == 2:
            run(before, train=False)

train, val = DataLoader(torch.randn(24, 8), 4), DataLoader(torch.randn(64, 8), 16)
for _ in range(3):
    run(train, True, before=val)
    with torch.no_grad():
        run(val, False)
dist.destroy_process_group()
"""


def test_batches_of_a_validation_are_no_samples_of_the_step(tmp_path: Path) -> None:
    script = SCRIPT.partition("made = ")[0].replace("SEED", "1") + VALIDATED
    (tmp_path / "script.py").write_text(script)
    command = ["-m", "distdiag.run", "--run-dir", "R", "script.py"]
    with launch(command, nproc=1, cwd=tmp_path, timeout=60, fork_ranks=True) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "R")
    assert rows(tmp_path / "R", "SELECT samples FROM step ORDER BY step") == [(4,)] * 18
