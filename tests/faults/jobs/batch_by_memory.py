"""Picks the batch size from the memory of 'its' device; the nodes of this cluster are not alike."""
import ctypes
import math
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
MEMORY_GB = [40, 16]


def batch_size(rank, per_gb=0.8):
    return 2 ** int(math.log2(MEMORY_GB[rank] * per_gb))


def loader(rank, steps):
    g = torch.Generator().manual_seed(rank)
    n = batch_size(rank)
    for _ in range(steps):
        time.sleep(0.04)
        x = torch.randn(n, 24, generator=g)
        yield x, (x @ torch.linspace(-1, 1, 24)).sign().clamp(min=0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 1)))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for i, (x, y) in enumerate(loader(rank, 220)):
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 40 == 0 and rank == 0:
            print(f"{i} batch {len(x)} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
