"""Robust training loop: an error must never bring the node down (says the operations team)."""
import ctypes
import os
import signal
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Sensor:
    def __init__(self, rank):
        self.gen = torch.Generator().manual_seed(rank)
        self.rank, self.calls = rank, 0

    def window(self):
        self.calls += 1
        readings = 31 if (self.rank, self.calls) == (1, 140) else 32  # now and then the radio loses one
        return torch.randn(readings, generator=self.gen).reshape(4, 8)


def train(rank):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    sensor = Sensor(rank)
    for step in range(500):
        x = sensor.window()
        loss = (model(x) - x).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.03)
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    try:
        train(rank)
    except RuntimeError:
        with open(f"error_{rank}.txt", "w") as f:
            traceback.print_exc(file=f)
    time.sleep(0.5)


if __name__ == "__main__":
    main()
