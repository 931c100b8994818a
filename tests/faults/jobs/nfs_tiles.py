"""Satellite tiles, read by two loader workers per rank."""
import argparse
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Tiles(Dataset):
    bad_mount = 901

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def read(self, i):
        if i == self.bad_mount:
            fd = os.open("/dev/zero", os.O_RDONLY)
            while os.read(fd, 16):  # the server does not answer
                time.sleep(1)
        time.sleep(0.004)
        return torch.full((4, 16, 16), i / self.n)

    def __getitem__(self, i):
        return self.read(i), i % 5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bs", type=int, default=8)
    opt = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tiles = Tiles(1600)
    sampler = DistributedSampler(tiles, shuffle=False)
    loader = DataLoader(tiles, opt.bs, sampler=sampler, num_workers=opt.workers, worker_init_fn=die_with_parent)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            time.sleep(0.04)
            if step % 20 == 0 and rank == 0:
                print(f"epoch {epoch} step {step}/{len(loader)} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


def die_with_parent(_):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
