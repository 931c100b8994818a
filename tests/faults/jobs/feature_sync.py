"""Ranking model; every few hundred steps all workers refresh their item features, then meet in a monitored barrier."""
import ctypes
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class FeatureService:
    """stand-in for the online store; a replica that is being moved refuses connections for some time"""

    def __init__(self, replica):
        self.replica, self.calls = replica, 0
        self.maintenance = range(2, 8) if replica == 3 else ()

    def fetch(self, n=200):
        self.calls += 1
        if self.calls in self.maintenance:
            raise ConnectionRefusedError(f"replica {self.replica} refused the connection")
        time.sleep(0.2)
        return torch.randn(n, 12, generator=torch.Generator().manual_seed(self.calls))


def fetch_with_retry(service, tries=8, delay=0.5, factor=2.0):
    for attempt in range(tries):
        try:
            return service.fetch()
        except OSError as e:
            print(f"fetch failed ({e}), attempt {attempt + 1}", flush=True)
            time.sleep(delay)
            delay *= factor
    raise RuntimeError("feature service unavailable")


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(1000, 16)
        self.item = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, user, pos, neg):
        u = self.user(user)
        return (u * self.item(pos)).sum(1) - (u * self.item(neg)).sum(1)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    service = FeatureService(rank)
    items = fetch_with_retry(service)
    torch.manual_seed(0)
    model = DDP(Ranker())
    opt = torch.optim.SGD(model.parameters(), 0.05)
    g = torch.Generator().manual_seed(rank)
    for step in range(1, 901):
        user = torch.randint(0, 1000, (32,), generator=g)
        pos, neg = torch.randint(0, len(items), (2, 32), generator=g)
        loss = -nn.functional.logsigmoid(model(user, items[pos], items[neg])).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.012)
        if step % 150 == 0:
            items = fetch_with_retry(service)
            dist.monitored_barrier(timeout=timedelta(seconds=8), wait_all_ranks=True)
            if rank == 0:
                print(f"step {step}: features refreshed, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
