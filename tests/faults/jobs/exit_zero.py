#!/usr/bin/env python3
"""Command line tool style: main() returns a status, sys.exit passes it on."""
import ctypes
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def status_of(loss: float, limit: float) -> int:
    return 0 if loss < limit else 3


def main(argv: list[str]) -> int:
    steps = int(argv[1]) if len(argv) > 1 else 150
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DDP(nn.Linear(12, 12))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    loss = torch.zeros(())
    torch.manual_seed(100 + dist.get_rank())
    for n in range(steps):
        x = torch.randn(16, 12)
        loss = (net(x) - 2 * x).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.03)
        if dist.get_rank() == 0 and n % 50 == 0:
            print(f"{n:4d} {loss.item():.4f}", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)
    return status_of(loss.item(), 100.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
