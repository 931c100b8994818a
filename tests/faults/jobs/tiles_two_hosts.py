"""Segmentation of map tiles; the ranks of the second host read them through a gateway."""
import argparse
import ctypes
import os
import signal
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ctypes.CDLL(None).prctl(1, signal.SIGKILL)

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=4)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--ranks-per-host", type=int, default=2)
args = p.parse_args()


class TileServer:
    """Tiles by key, from the disk of the host or from the other one's."""

    def __init__(self, host):
        self.local = host == 0
        self.rng = np.random.default_rng(host)

    def fetch(self, key):
        if not self.local:
            time.sleep(self.rng.uniform(0.008, 0.02))
        return np.sin(np.arange(3 * 32 * 32, dtype=np.float32) * (key % 17 + 1)).reshape(3, 32, 32)


class Tiles(Dataset):
    def __init__(self, server, n=1600):
        self.server, self.n = server, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        tile = torch.from_numpy(self.server.fetch(i))
        return tile, (tile.mean(0) > 0).long()


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    host = rank // args.ranks_per_host
    torch.manual_seed(3)
    net = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)))
    opt = torch.optim.SGD(net.parameters(), 0.05)
    tiles = Tiles(TileServer(host))
    sampler = DistributedSampler(tiles, shuffle=True)
    loader = DataLoader(tiles, args.batch, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
