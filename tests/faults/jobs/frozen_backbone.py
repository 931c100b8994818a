"""Transfer learning: the backbone is frozen, only the head is trained. EMA of the head for evaluation."""
import argparse
import copy
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.head(self.backbone(x))


class EMA:
    def __init__(self, module, decay=0.99):
        self.shadow, self.decay = copy.deepcopy(module), decay

    @torch.no_grad()
    def update(self, module):
        for s, p in zip(self.shadow.parameters(), module.parameters()):
            s.lerp_(p, 1 - self.decay)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--freeze", default="backbone")
    args = ap.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(args.freeze))
    ddp = DDP(model)
    ema = EMA(model.head)
    opt = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], 0.05)
    data = TensorDataset(torch.randn(1200, 3, 20, 20), torch.randint(0, 4, (1200,)))
    sampler = DistributedSampler(data)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 8, sampler=sampler):
            loss = nn.functional.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update(model.head)
            time.sleep(0.03)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
