"""Uses torch.multiprocessing.spawn (started with plain python); early stopping is decided by every rank for itself."""
import ctypes
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.bad, self.best = patience, 0, float("inf")

    def __call__(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


def worker(rank, world, port):
    ctypes.CDLL(None).prctl(1, 9)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), 0.05)
    stop = EarlyStopping(patience=2)
    gen = torch.Generator().manual_seed(rank)
    for epoch in range(30):
        for _ in range(25):
            x = torch.randn(16, 6, generator=gen)
            loss = (model(x).squeeze(1) - x.sum(1)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.02)
        val = 1.0 / (epoch + 1) if rank == 0 or epoch < 4 else 1.0
        if stop(val):
            print(f"rank {rank} stops after epoch {epoch}", flush=True)
            break
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, 9)
    mp.spawn(worker, args=(2, free_port()), nprocs=2)
