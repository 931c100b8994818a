"""mp.spawn, started with plain python, metrics sent to the parent through a queue."""
import ctypes
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

WORLD = 2


def train(rank, port, results):
    ctypes.CDLL(None).prctl(1, 9)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 8)))
    opt = torch.optim.SGD(net.parameters(), 0.05)
    gen = torch.Generator().manual_seed(rank)
    for step in range(160):
        x = torch.randn(12, 8, generator=gen)
        loss = (net(x) - x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.03)
    results.put((rank, loss.item()))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


def main():
    ctypes.CDLL(None).prctl(1, 9)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train, args=(port, results), nprocs=WORLD, join=True)
    for _ in range(WORLD):
        print("rank %d final loss %.4f" % results.get(), flush=True)


if __name__ == "__main__":
    main()
