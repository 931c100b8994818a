"""Fine-tuning in two stages; each stage wraps the network anew."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


def run_epoch(model, optimizer, gen):
    for _ in range(30):
        x, y = torch.randn(16, 32, generator=gen), torch.randint(0, 4, (16,), generator=gen)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Classifier()
    net.backbone.requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(1 + dist.get_rank())
    for epoch in range(6):
        if epoch == 2:
            net.backbone.requires_grad_(True)
            model = DDP(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        run_epoch(model, optimizer, gen)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
