"""Dialogue model; ranks own customers, and the customer of rank 2 writes very long messages."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
TURNS = {0: 3, 1: 3, 2: 16}


class Recurrent(nn.Module):
    """Reads the turns of a dialogue one by one; each turn costs one (slow) tokenisation."""

    def __init__(self, d=32):
        super().__init__()
        self.cell, self.out = nn.GRUCell(d, d), nn.Linear(d, 2)

    def forward(self, turns):
        h = torch.zeros(turns.size(0), turns.size(2))
        for t in turns.unbind(1):
            time.sleep(0.004)
            h = self.cell(t, h)
        return self.out(h)


class App:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.model = DDP(Recurrent())
        self.optim = torch.optim.Adam(self.model.parameters(), 1e-3)

    def dialogues(self):
        gen = torch.Generator().manual_seed(self.rank)
        while True:
            yield torch.randn(6, TURNS[self.rank], 32, generator=gen)

    def run(self, steps):
        for n, x in zip(range(steps), self.dialogues()):
            loss = nn.functional.cross_entropy(self.model(x), (x.mean((1, 2)) > 0).long())
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            if n % 30 == 0 and self.rank == 0:
                print(f"dialogue batch {n} loss {loss.item():.4f}", flush=True)
        dist.destroy_process_group()
        time.sleep(0.5)


App().run(180)
