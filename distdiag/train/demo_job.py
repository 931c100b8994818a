"""The job of `distdiag demo`: two ranks on the CPU. After some steps rank 0 evaluates through the DDP wrapper, alone, and both hang."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EVALUATE_AT = 200  # steps
TIMEOUT = timedelta(minutes=3)  # ends the ranks of a demo that was killed


def evaluate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = model(torch.randn(64, 32)).square().mean().item()
    model.train()
    return loss


def main() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 10_000):
        loss = model(torch.randn(64, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == EVALUATE_AT:
            if rank == 0:
                print(f"step {step}: loss {evaluate(model):.4f}", flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
