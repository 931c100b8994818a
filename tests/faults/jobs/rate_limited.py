"""Trains on data of a public API with a rate limit: after every 60 batches all ranks have to wait for the next window."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
WINDOW_S, CALLS = 5.0, 60


class Api:
    def __init__(self, seed):
        self.gen, self.calls = torch.Generator().manual_seed(seed), 0

    def fetch(self, n):
        if self.calls == CALLS:
            time.sleep(WINDOW_S)
            self.calls = 0
        self.calls += 1
        time.sleep(0.02)
        x = torch.randn(n, 11, generator=self.gen)
        return x, (x[:, 0] * x[:, 1] > 0).float()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    api = Api(rank)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(11, 48), nn.ReLU(), nn.Linear(48, 1)))
    opt = torch.optim.Adam(model.parameters(), 4e-3)
    for i in range(170):
        x, y = api.fetch(20)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 30 == 0 and rank == 0:
            print(f"batch {i} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)
