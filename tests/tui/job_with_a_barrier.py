"""A small DDP job that deadlocks on command: once the file $GO exists, rank 1 calls a barrier that rank 0 does not."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GO = Path(os.environ["GO"])


def evaluate() -> None:
    dist.barrier()  # the line that the finding must name


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        if rank == 1 and GO.exists():
            evaluate()


if __name__ == "__main__":
    main()
