"""Accumulates the documents of a step that are long enough; only the last backward of a step averages gradients."""
import contextlib
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    g = torch.Generator().manual_seed(rank)
    for step in range(110):
        lengths = torch.randint(1, 9, (64,), generator=g).split(8)
        micro = [x for x in lengths if x.sum() > 30] or [lengths[0]]
        for i, _ in enumerate(micro):
            last = i == len(micro) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                x = torch.randn(8, 16, generator=g)
                loss = (model(x) - x.flip(1)).pow(2).mean() / len(micro)
                loss.backward()
                time.sleep(0.012)
        tokens = torch.tensor(float(sum(m.sum() for m in micro)))
        dist.all_reduce(tokens)
        opt.step()
        opt.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
