"""Plant disease classifier; the images of odd ranks lie on the old RAID."""
import argparse
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Leaves(Dataset):
    MOUNTS = ("/ssd/leaves", "/raid/leaves")

    def __init__(self, n, rank):
        self.n, self.mount = n, self.MOUNTS[rank % 2]

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.seek()
        return torch.full((3, 20, 20), (i % 17) / 17), i % 4

    def seek(self):
        time.sleep(0.001 if "ssd" in self.mount else 0.012)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=6)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    data = Leaves(1800, rank)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1296, 4)))
    opt = torch.optim.SGD(net.parameters(), 0.02)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % 25 == 0 and rank == 0:
                print(f"{i}/{len(loader)} {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
