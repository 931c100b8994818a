"""Clip classification; decoding needs a lot of memory now and then."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FRAMES = 8


class Clips(Dataset):
    def __init__(self, n):
        self.lengths = [FRAMES + i % 5 for i in range(n)]
        self.lengths[643] = 90_000  # a whole film

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        if self.lengths[i] > 10_000:
            os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does when the film is decoded
        time.sleep(0.003)
        return torch.rand(FRAMES, 3, 8, 8, generator=torch.Generator().manual_seed(i)), i % 4


class ClipNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame = nn.Linear(192, 64)
        self.time = nn.GRU(64, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, clip):
        return self.head(self.time(torch.relu(self.frame(clip.flatten(2))))[1][0])


def run():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    clips = Clips(1200)
    sampler = DistributedSampler(clips, shuffle=False)
    loader = DataLoader(clips, batch_size=6, sampler=sampler, num_workers=1)
    torch.manual_seed(0)
    net = DistributedDataParallel(ClipNet())
    optim = torch.optim.AdamW(net.parameters(), 1e-3)
    for i, (clip, label) in enumerate(loader):
        loss = nn.functional.cross_entropy(net(clip), label)
        optim.zero_grad()
        loss.backward()
        optim.step()
        time.sleep(0.05)
        if rank == 0 and i % 10 == 0:
            print(f"clip batch {i}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    run()
