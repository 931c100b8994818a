"""Early stopping, decided by rank 0 and broadcast as an object; learning rate finder before the training."""
import ctypes
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def make(width=48):
    torch.manual_seed(4)
    return DDP(nn.Sequential(nn.Linear(7, width), nn.ReLU(), nn.Linear(width, 1)))


def batch(gen):
    x = torch.randn(24, 7, generator=gen)
    return x, x[:, :3].sum(1, keepdim=True)


def lr_find(gen, lo=1e-4, hi=1.0, steps=30):
    model, best, best_loss = make(), lo, math.inf
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    for k in range(steps):
        lr = lo * (hi / lo) ** (k / steps)
        opt = torch.optim.SGD(model.parameters(), lr)
        x, y = batch(gen)
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if mean.item() < best_loss:
            best, best_loss = lr, mean.item()
        time.sleep(0.02)
    model.load_state_dict(saved)
    return model, best / 3


def main():
    ctypes.CDLL(None).prctl(1, 9)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gen = torch.Generator().manual_seed(rank)
    model, lr = lr_find(gen)
    opt = torch.optim.SGD(model.parameters(), lr)
    best, bad = math.inf, 0
    for epoch in range(50):
        for _ in range(40):
            x, y = batch(gen)
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.02)
        verdict = [None]
        if rank == 0:
            value = loss.item() if epoch < 4 else 1.0
            best, bad = (value, 0) if value < best else (best, bad + 1)
            verdict = [bad >= 2]
            print(f"epoch {epoch} lr {lr:.4f} loss {value:.4f} bad {bad}", flush=True)
        dist.broadcast_object_list(verdict, src=0)
        if verdict[0]:
            break
    dist.destroy_process_group()
    time.sleep(0.5)


main()
