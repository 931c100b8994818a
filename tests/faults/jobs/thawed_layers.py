"""Gradual unfreezing: first the head trains, then all layers. Gradients are averaged by hand, those of what trains only."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Thawing:
    def __init__(self, depth=6, dim=48):
        torch.manual_seed(5)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(dim, dim, bias=False), nn.Tanh()) for _ in range(depth)), nn.Linear(dim, 6))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)
        self.named = dict(self.net.named_parameters())
        self.thaw([f"{depth}.weight", f"{depth}.bias"])

    def thaw(self, names):
        self.trains = names
        for name, p in self.named.items():
            p.requires_grad_(name in self.trains)

    def average(self):
        for name in self.trains:
            grad = self.named[name].grad
            dist.all_reduce(grad)
            grad /= dist.get_world_size()

    def step(self, x, y):
        self.opt.zero_grad()
        F.cross_entropy(self.net(x), y).backward()
        self.average()
        self.opt.step()


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = Thawing()
    for p in job.net.parameters():
        dist.broadcast(p.data, src=0)
    g = torch.Generator().manual_seed(100 + rank)
    for step in range(4000):
        if step == 150:
            job.thaw({n for n in job.named if n.endswith("0.weight")})
        y = torch.randint(0, 6, (32,), generator=g)
        x = torch.randn(32, 48, generator=g) + F.one_hot(y, 48)
        job.step(x, y)
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
