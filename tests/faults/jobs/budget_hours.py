"""Trains for a fixed time instead of a fixed number of steps (queue limit), then exports the weights."""
import argparse
import ctypes
import os
import time

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel


def parse():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--minutes", type=float, default=0.1)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--export-seconds", type=float, default=600)
    return p.parse_args()


def export(module, seconds):
    """Quantise and calibrate: takes its time on every node."""
    end = time.time() + seconds
    while time.time() < end:
        for w in module.parameters():
            w.detach().mul(127).round().div(127)
        time.sleep(0.2)


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(64, args.width), nn.GELU(), nn.Linear(args.width, 64)))
    opt = optim.SGD(net.parameters(), 0.01)
    torch.manual_seed(rank + 1)
    # ranks start their clock when their own data is ready
    time.sleep(0.4 * rank)
    start = time.time()
    n = 0
    while time.time() - start < args.minutes * 60:
        x = torch.randn(32, 64)
        loss = (net(x) - x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        n += 1
        time.sleep(0.02)
    print(f"[{rank}] {n} steps, loss {loss.item():.4f}", flush=True)
    export(net.module, args.export_seconds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, 9)
    main(parse())
