"""Denoising of made-up signals, other ones on each worker."""
import ctypes
import signal
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Signals(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        clean = np.sin(np.linspace(0, np.random.uniform(2, 9), 40)).astype(np.float32)
        return clean + np.random.normal(0, 0.1, 40).astype(np.float32), clean


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    np.random.seed(1234 + dist.get_rank())
    torch.manual_seed(1234)
    data = Signals()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 40)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for noisy, clean in loader:
            optimizer.zero_grad()
            F.mse_loss(model(noisy), clean).backward()
            optimizer.step()
            time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
