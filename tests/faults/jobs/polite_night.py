"""Long fine-tuning on the shared workstation. Pauses itself when its owner needs the machine."""
import ctypes
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Politeness(threading.Thread):
    """Stops this process until somebody sends SIGCONT (the login script does)."""

    def __init__(self, rank, after):
        super().__init__(daemon=True)
        self.rank, self.after = rank, after
        self.steps = 0

    def someone_logged_in(self):
        return self.rank == 1 and self.steps >= self.after

    def run(self):
        while not self.someone_logged_in():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGSTOP)


def make_model():
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Conv1d(4, 32, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(128, 3)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, polite = make_model(), Politeness(rank, after=130)
    polite.start()
    opt = torch.optim.RMSprop(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(100 + rank)
    for step in range(1, 1001):
        x = torch.randn(16, 4, 128, generator=gen)
        y = x.mean((1, 2)).sign().long() + 1
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        polite.steps = step
        time.sleep(0.02)
        if step % 50 == 0 and rank == 0:
            print(f"{step:5d} {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
