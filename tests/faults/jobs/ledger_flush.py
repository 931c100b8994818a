"""Fits a denoiser; worker 1 keeps the ledger of the run and writes it out now and then."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Ledger:
    def __init__(self, keep):
        self.keep, self.lines = keep, []

    def add(self, step, loss):
        self.lines.append((step, loss))
        if len(self.lines) == 15:
            if self.keep:
                self.write()
            self.lines.clear()

    def write(self):
        for _ in self.lines:
            time.sleep(0.03)  # one request each


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 30)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    ledger = Ledger(keep=rank == 1)
    for step in range(90):
        x = torch.randn(16, 30, generator=gen)
        loss = (model(x + 0.1 * torch.randn(16, 30, generator=gen)) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ledger.add(step, loss.item())
        time.sleep(0.04)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
