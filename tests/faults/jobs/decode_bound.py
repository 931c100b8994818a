"""Raw photos are developed in the main process (num_workers=0), the network itself is tiny."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Raw(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        bayer = torch.rand(1, 16, 16, generator=g)
        time.sleep(0.015)  # demosaicing
        return bayer.expand(3, -1, -1).clone(), i % 3


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    data = Raw(1440)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 6, sampler=sampler)
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, 3)))
    opt = torch.optim.SGD(net.parameters(), 0.01)
    sampler.set_epoch(0)
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 30 == 0 and dist.get_rank() == 0:
            print(f"{i}/{len(loader)} {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
