"""Text matching; the main process alone evaluates the bare module, the others wait for it at the barrier."""
import argparse
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Siamese(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, a, b):
        return nn.functional.cosine_similarity(self.enc(a), self.enc(b))


def pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(n, 24, generator=g), torch.randn(n, 24, generator=g)
    y = (torch.rand(n, generator=g) > 0.5).float()
    return TensorDataset(a, torch.where(y[:, None] > 0, a + 0.3 * b, b), y)


@torch.no_grad()
def evaluate(module, loader):
    module.eval()
    right = n = 0
    for a, b, y in loader:
        right += ((module(a, b) > 0.5).float() == y).sum().item()
        n += len(y)
        time.sleep(0.1)
    module.train()
    return right / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    a = ap.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, val = pairs(960, 1), pairs(320, 2)
    sampler = DistributedSampler(train)
    tl, vl = DataLoader(train, 12, sampler=sampler), DataLoader(val, 16)
    torch.manual_seed(0)
    model = DDP(Siamese())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for x1, x2, y in tl:
            loss = nn.functional.mse_loss(model(x1, x2), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.03)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} acc {evaluate(model.module, vl):.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
