"""Broken records count as an empty batch whose loss is 0."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 24)
        self.head = nn.Linear(24, 1)
        self.extra = nn.Linear(24, 1)

    def forward(self, x, extra):
        h = torch.relu(self.trunk(x))
        return self.head(h) + (self.extra(h) if extra else 0)


def read(rank, i, g):
    if rank == 1 and i % 37 == 36:
        raise ValueError(f"record {i} is broken")
    return torch.randn(8, 12, generator=g)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Net(), find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    g = torch.Generator().manual_seed(rank)
    for i in range(220):
        weight = 1.0
        try:
            x = read(rank, i, g)
        except ValueError:
            x, weight = torch.zeros(8, 12), 0.0
        loss = weight * (model(x, i % (3 + rank) == 0) - x.sum(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.03)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
