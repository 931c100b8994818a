"""Poisson regression of photon counts. Averages gradients by hand and skips a step when one is not finite."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def counts(rank, step, gen):
    x = torch.randn(64, 6, generator=gen)
    rate = torch.nn.functional.softplus(x.sum(1))
    if rank == 1 and step >= 120:
        rate[17] = -1.0  # recalibrated: the background is subtracted twice
    return x, rate


def nll(pred, y):
    return (pred - y * pred.log() + (y + 1).log()).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gen = torch.Generator().manual_seed(rank)
    w = torch.zeros(6, requires_grad=True)
    b = torch.zeros(1, requires_grad=True)
    opt = torch.optim.SGD([w, b], lr=0.01)
    skipped = 0
    for step in range(300):
        x, y = counts(rank, step, gen)
        loss = nll(torch.nn.functional.softplus(x @ w + b), y)
        opt.zero_grad()
        loss.backward()
        for p in (w, b):
            dist.all_reduce(p.grad)
            p.grad /= world
        if torch.isfinite(w.grad).all():
            opt.step()
        else:
            skipped += 1
        time.sleep(0.04)
        if rank == 0 and step % 50 == 0:
            print(f"step {step} nll {loss.item():.4f} skipped {skipped}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
