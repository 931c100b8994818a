"""DataLoader with persistent workers, prefetching and a collate function."""
import argparse
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Signals(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        time.sleep(0.002)
        return torch.randn(1, 100 + 10 * (i % 3), generator=g), i % 3


def crop(batch):
    return torch.stack([x[:, :100] for x, _ in batch]), torch.tensor([y for _, y in batch])


def die_with_parent(worker_id):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--epochs", type=int, default=3)
    a = p.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    data = Signals(1000)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 10, sampler=sampler, num_workers=a.workers, persistent_workers=True, prefetch_factor=4,
                        collate_fn=crop, worker_init_fn=die_with_parent, drop_last=True)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Conv1d(1, 16, 9, 4), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(64, 3)))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.03)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
