"""Hyper-parameter sweep: every process takes its share of the grid, torch.distributed is never used."""
import ctypes
import itertools
import json
import os
import signal
import time

import torch
import torch.nn as nn

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
GRID = list(itertools.product([0.1, 0.03, 0.01], [16, 64], ["relu", "tanh"]))


def fit(lr, width, act, steps=60):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, width), nn.ReLU() if act == "relu" else nn.Tanh(), nn.Linear(width, 1))
    opt = torch.optim.SGD(net.parameters(), lr)
    for _ in range(steps):
        x = torch.randn(32, 5)
        loss = (net(x).squeeze(1) - x.prod(1)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.015)
    return loss.item()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    best = None
    for lr, width, act in GRID[rank::world]:
        loss = fit(lr, width, act)
        best = min(best or (loss, lr, width, act), (loss, lr, width, act))
    with open(f"best_{rank}.json", "w") as f:
        json.dump(best, f)
    print(f"process {rank}: {best}", flush=True)


if __name__ == "__main__":
    main()
