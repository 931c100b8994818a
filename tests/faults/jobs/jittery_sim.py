"""Physics-informed training; the simulator's time per call varies by chance, on average alike on all ranks."""
import ctypes
import random
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def simulate(rnd, n):
    """Adaptive steps: 40 ms, give or take a few."""
    time.sleep(0.04 + rnd.gauss(0, 0.003))
    t = torch.tensor([[rnd.random() * 6] for _ in range(n)])
    return t, torch.cat([t.sin(), t.cos()], 1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rnd = random.Random(rank)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(200):
        t, target = simulate(rnd, 24)
        out = model(t)
        loss = (out - target).pow(2).mean() + 0.1 * (out.pow(2).sum(1) - 1).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 40 == 0:
            print(f"{step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
