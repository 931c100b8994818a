"""MNIST-like MLP-Mixer; find_unused_parameters was switched on once 'to be safe'."""
import argparse
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Mixer(nn.Module):
    def __init__(self, tokens=16, dim=49, depth=3):
        super().__init__()
        self.tok = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(depth))
        self.chan = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.fc = nn.Linear(dim, 10)

    def forward(self, x):
        for t, c in zip(self.tok, self.chan):
            x = x + t(x.transpose(1, 2)).transpose(1, 2)
            x = x + torch.relu(c(x))
        return self.fc(x.mean(1))


def main(a):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(4800, 16, 49)
    data = TensorDataset(x, (x.mean((1, 2)) * 50).long().clamp(-4, 5) + 4)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, a.batch, sampler=sampler)
    model = DDP(Mixer(), find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), a.lr)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.03)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.05)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    main(ap.parse_args())
