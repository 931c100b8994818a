"""Long fine-tuning on the shared workstation. Pauses itself when its owner needs the machine."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Politeness:
    """Stops this process until somebody sends SIGCONT (the login script does)."""

    def __init__(self, rank, at_step):
        self.rank, self.at_step = rank, at_step

    def someone_logged_in(self, step):
        return self.rank == 1 and step == self.at_step

    def maybe_pause(self, step):
        if self.someone_logged_in(step):
            os.kill(os.getpid(), signal.SIGSTOP)


def make_model():
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Conv1d(4, 32, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(128, 3)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, polite = make_model(), Politeness(rank, at_step=130)
    opt = torch.optim.RMSprop(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(100 + rank)
    for step in range(1, 1001):
        x = torch.randn(16, 4, 128, generator=gen)
        y = x.mean((1, 2)).sign().long() + 1
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        polite.maybe_pause(step)
        time.sleep(0.02)
        if step % 50 == 0 and rank == 0:
            print(f"{step:5d} {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
