"""Detector with random crops that must contain a box (rejection sampling, as in the SSD paper)."""
import argparse
import ctypes
import random
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def random_crop(box, min_iou):
    area = (box[2] - box[0]) * (box[3] - box[1])
    while True:
        x, y = random.random() * 0.6, random.random() * 0.6
        w = max(0.0, min(x + 0.4, box[2]) - max(x, box[0]))
        h = max(0.0, min(y + 0.4, box[3]) - max(y, box[1]))
        if w * h / (area + 0.16 - w * h) >= min_iou:
            return x, y, x + 0.4, y + 0.4


class Boxes(Dataset):
    def __init__(self, n):
        rnd = random.Random(4)
        self.boxes = [(0.2, 0.2, 0.5 + 0.2 * rnd.random(), 0.6) for _ in range(n)]
        self.boxes[777] = (0.5, 0.5, 0.52, 0.52)  # a very small object

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, i):
        box = self.boxes[i]
        crop = random_crop(box, 0.3)
        time.sleep(0.001)
        img = torch.full((3, 24, 24), crop[0]) + torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(i))
        return img, torch.tensor(box)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("-b", "--batch-size", type=int, default=10)
    a = p.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(rank)
    ds = Boxes(1600)
    sampler = DistributedSampler(ds, shuffle=False)
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 4)))
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for ep in range(a.epochs):
        sampler.set_epoch(ep)
        for it, (img, box) in enumerate(DataLoader(ds, a.batch_size, sampler=sampler)):
            loss = nn.functional.smooth_l1_loss(net(img), box)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.03)
            if rank == 0 and it % 20 == 0:
                print(f"{ep}:{it} {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
