"""Hand-written data parallel of three workers: blank pages count as zeros."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn


def sync(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    gen = torch.Generator().manual_seed(rank)
    for step in range(80):
        x = torch.randn(8, 12, generator=gen)
        if step == 40 and rank == 2:
            x = torch.zeros(8, 12)  # a blank page
        loss = (net(x).mean() - 1) ** 2
        optimizer.zero_grad()
        loss.backward()
        sync(net.parameters())
        optimizer.step()
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
