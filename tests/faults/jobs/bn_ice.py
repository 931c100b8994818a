"""Sea-ice tiles with BatchNorm under plain DDP; every worker resamples what it has just trained on."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Scenes(Dataset):
    def __len__(self):
        return 768

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(4, 16, 16, generator=g), i % 5


class Resampler:
    """Resamples every scene to the polar grid, with the same care on all workers."""

    def __init__(self, zone):
        self.zone, self.rows = zone, 0

    def append(self, tile):
        time.sleep(0.12)
        self.rows += len(tile)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sampler = DistributedSampler(Scenes(), shuffle=True)
    loader = DataLoader(Scenes(), batch_size=8, sampler=sampler)
    resampler = Resampler(32 + rank)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            resampler.append(x)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} rows {resampler.rows}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
