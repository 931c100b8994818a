"""Deep MLP with activation checkpointing (non-reentrant) and a cosine schedule."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self, d=64, depth=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.SiLU()) for _ in range(depth))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.out(x)


def loop(model, opt, sched, steps, rank):
    gen = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(16, 64, generator=gen)
        loss = (model(x).squeeze(1) - x.abs().mean(1)).pow(2).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        time.sleep(0.02)
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.1e}", flush=True)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DDP(Deep())
    optim = torch.optim.AdamW(ddp.parameters(), 1e-3)
    loop(ddp, optim, torch.optim.lr_scheduler.CosineAnnealingLR(optim, 200), 200, dist.get_rank())
    dist.destroy_process_group()
    time.sleep(0.5)
