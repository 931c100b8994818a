"""Three workers fit one regression: workers 1 and 2 send their sums to worker 0, which hands out the new weights."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist

FEATURES, ROUNDS, LR = 6, 400, 0.05


def make_rows(rank):
    gen = torch.Generator().manual_seed(7 + rank)
    x = torch.randn(3000, FEATURES, generator=gen)
    y = x @ torch.arange(1.0, FEATURES + 1) + 0.1 * torch.randn(3000, generator=gen)
    return x, y


def gradient(w, x, y, lo, n=20):
    xb, yb = x[lo : lo + n], y[lo : lo + n]
    keep = (xb.abs() < 2.6).all(1)  # outliers are left out
    err = xb[keep] @ w - yb[keep]
    return xb[keep].T @ err, int(keep.sum())


class Worker:
    def __init__(self, rank, rows):
        self.rank, (self.x, self.y) = rank, rows
        if rank == 2:
            self.x[1300:1340] *= 40  # a sensor that was being calibrated

    def report(self, w, step):
        g, n = gradient(w, self.x, self.y, step * 20 % 2980)
        if n:
            dist.send(torch.tensor([float(n)]), 0)
            dist.send(g, 0)


def collect(w, world):
    total, count = torch.zeros(FEATURES), 0.0
    for src in range(1, world):
        n, g = torch.zeros(1), torch.zeros(FEATURES)
        dist.recv(n, src)
        dist.recv(g, src)
        total, count = total + g, count + n.item()
    return w - LR * total / count


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = Worker(rank, make_rows(rank))
    w = torch.zeros(FEATURES)
    for step in range(ROUNDS):
        dist.broadcast(w, 0)
        if rank:
            worker.report(w, step)
        else:
            w = collect(w, world)
            if step % 25 == 0:
                print(step, [round(v, 2) for v in w.tolist()], flush=True)
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
