"""Stochastic depth: every rank drops other blocks in every step, so find_unused_parameters=True is needed."""
import argparse
import ctypes
import random
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))

    def forward(self, x):
        return x + self.f(x)


class DropNet(nn.Module):
    def __init__(self, d=40, depth=8, p=0.25):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(d) for _ in range(depth))
        self.head, self.p = nn.Linear(d, 6), p

    def forward(self, x):
        for b in self.blocks:
            if self.training and random.random() < self.p:
                continue
            x = b(x)
        return self.head(x)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=200)
    a = p.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(rank)
    torch.manual_seed(0)
    model = DDP(DropNet(), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(a.steps):
        x = torch.randn(16, 40, generator=gen)
        loss = nn.functional.cross_entropy(model(x), x[:, :6].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.025)
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
