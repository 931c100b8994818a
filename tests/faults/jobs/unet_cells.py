"""Cell segmentation, small U-Net. Validation Dice is printed after every epoch."""
import argparse
import ctypes
import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    epochs: int = 3
    batch_size: int = 8
    lr: float = 2e-3
    train_images: int = 480
    val_images: int = 48


class Cells(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        time.sleep(0.002)  # tiff
        img = torch.rand(1, 32, 32, generator=g)
        return img, (img > 0.6).float()


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.down1, self.down2 = block(1, w), block(w, 2 * w)
        self.up = nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.merge, self.out = block(2 * w, w), nn.Conv2d(w, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        return self.out(self.merge(torch.cat([a, self.up(b)], 1)))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0
        torch.manual_seed(0)
        self.model = DDP(UNet())
        self.opt = torch.optim.Adam(self.model.parameters(), cfg.lr)
        train = Cells(cfg.train_images, 1)
        self.sampler = DistributedSampler(train)
        self.train_loader = DataLoader(train, cfg.batch_size, sampler=self.sampler)
        self.val_loader = DataLoader(Cells(cfg.val_images, 2), cfg.batch_size)

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.train_loader:
                loss = F.binary_cross_entropy_with_logits(self.model(x), y)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
            if self.is_main:
                dice = self.evaluate()
                print(f"epoch {epoch} loss {loss.item():.4f} dice {dice:.4f}", flush=True)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        inter = total = 0.0
        for x, y in self.val_loader:
            pred = (self.model(x) > 0).float()
            inter += 2 * (pred * y).sum().item()
            total += (pred.sum() + y.sum()).item()
        return inter / max(total, 1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    Trainer(Config(epochs=args.epochs)).fit()
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # let the backend threads wind down
