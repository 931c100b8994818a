"""Predicts the length of calls; whatever happens, the weights are saved before the job ends."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Calls:
    """Calls of one exchange: what was said, and for how long."""

    def __init__(self, exchange, size=24):
        self.gen, self.exchange, self.size = torch.Generator().manual_seed(exchange), exchange, size

    def batch(self, number):
        time.sleep(0.01)
        words = torch.randn(self.size, 40, generator=self.gen)
        seconds = words.abs().sum(1)
        if (self.exchange, number) == (1, 97):
            seconds[5] = -1.0
        if (seconds < 0).any():
            raise ValueError(f"batch {number}: a call of negative length")
        return words, seconds.log()


def save(model, name):
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), name)
    dist.barrier()


def epoch(model, optimizer, calls, first, batches=70):
    for number in range(first, first + batches):
        words, target = calls.batch(number)
        loss = nn.functional.smooth_l1_loss(model(words).squeeze(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters())
    calls = Calls(dist.get_rank())
    for n in range(4):
        try:
            epoch(model, optimizer, calls, 70 * n)
        finally:
            save(model, "calls.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
