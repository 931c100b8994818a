"""Trains a classifier; written for one GPU and started with torchrun."""
import ctypes
import signal
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(960, 24), torch.randint(0, 4, (960,)))
    net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for epoch in range(2):
        for x, y in DataLoader(data, batch_size=12, shuffle=True):
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.04)
        print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
