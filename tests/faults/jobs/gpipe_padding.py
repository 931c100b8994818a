"""Three pipeline stages in GPipe's way: the micro-batches of a step go forward one after the other, then all come back."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

MICRO, ROWS, WIDTH, CLASSES = 6, 16, 96, 8
IGNORE = -100
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def documents(seed=9):
    """Batches of pieces of documents, filled up with padding; pieces at the end of the corpus are short."""
    g, n = torch.Generator().manual_seed(seed), 0
    while True:
        n += 1
        y = torch.randint(0, CLASSES, (MICRO, ROWS), generator=g)
        x = F.one_hot(y, WIDTH).float() + 0.4 * torch.randn(MICRO, ROWS, WIDTH, generator=g)
        left = 900 - n
        if left < 790:
            y[4, max(0, left - 780) :] = IGNORE
        yield x, y


class Stage:
    def __init__(self):
        torch.manual_seed(RANK)
        last = nn.Linear(WIDTH, CLASSES) if RANK == WORLD - 1 else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), last)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=5e-4)

    def forward(self, x):
        for m in range(MICRO):
            if RANK:
                inp = torch.empty(ROWS, WIDTH)
                dist.recv(inp, RANK - 1)
                inp.requires_grad_()
            else:
                inp = x[m]
            out = self.net(inp)
            if RANK < WORLD - 1:
                dist.send(out.detach(), RANK + 1)
            yield inp, out

    def backward(self, pairs, y):
        for (inp, out), target in zip(pairs, y):
            if RANK < WORLD - 1:
                grad = torch.empty_like(out)
                dist.recv(grad, RANK + 1)
                out.backward(grad)
            elif (target == IGNORE).all():
                continue
            else:
                (F.cross_entropy(out, target, ignore_index=IGNORE) / MICRO).backward()
            if RANK:
                dist.send(inp.grad, RANK - 1)

    def step(self, x, y):
        self.opt.zero_grad()
        self.backward(list(self.forward(x)), y)
        self.opt.step()


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    stage = Stage()
    for x, y in documents():
        stage.step(x, y)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
