"""Recommender; the main process also holds the whole item catalogue in memory for the nightly export."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Catalogue:
    def __init__(self, items, dim):
        self.table = torch.randn(items, dim)
        self.norm = self.table.norm(dim=1)


class TwoTower(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.user, self.item = nn.Linear(20, d), nn.Linear(12, d)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    catalogue = Catalogue(1_000_000, 256) if rank == 0 else None
    dist.barrier()
    torch.manual_seed(0)
    model = DDP(TwoTower())
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(260):
        u, i = torch.randn(32, 20, generator=gen), torch.randn(32, 12, generator=gen)
        y = (u[:, 0] * i[:, 0] > 0).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(u, i), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.035)
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} catalogue {len(catalogue.table)}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
