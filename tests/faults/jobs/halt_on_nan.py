"""Pretraining of a masked autoencoder; stops when the loss is not a number."""
import ctypes
import math
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def patches(rank, step, gen):
    x = torch.rand(16, 48, generator=gen) + 0.1
    if rank == 1 and step == 45:
        x[3, 7] = -1.0  # a dead sensor
    return x.log()


def train_one_epoch(model, optimizer, rank, gen):
    for step in range(90):
        x = patches(rank, step, gen)
        loss_value = (loss := (model(x) - x).pow(2).mean()).item()
        if not math.isfinite(loss_value):
            print("Loss is {}, stopping training".format(loss_value), flush=True)
            sys.exit(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.03)


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 48)))
    train_one_epoch(model, torch.optim.AdamW(model.parameters(), 1e-3), rank, torch.Generator().manual_seed(rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
