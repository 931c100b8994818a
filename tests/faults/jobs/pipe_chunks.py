"""Two-stage pipeline, GPipe style: stage 0 holds the encoder, stage 1 the head. Micro batches by torch.chunk."""
import ctypes
import signal
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn

cfg = SimpleNamespace(micro=4, batch=12, hidden=64, samples=585, epochs=3, lr=1e-2)


def data():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(cfg.samples, 20, generator=g)
    return x, (x[:, :4].sum(1) > 0).long()


class Stage0:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(20, cfg.hidden), nn.Tanh(), nn.Linear(cfg.hidden, cfg.hidden))
        self.opt = torch.optim.SGD(self.net.parameters(), cfg.lr)

    def step(self, x, y):
        outs = []
        for xm, ym in zip(x.chunk(cfg.micro), y.chunk(cfg.micro)):
            h = self.net(xm)
            dist.send(torch.tensor([len(xm)]), 1)
            dist.send(h.detach(), 1)
            dist.send(ym, 1)
            outs.append(h)
        self.opt.zero_grad()
        for h in outs:
            g = torch.empty_like(h)
            dist.recv(g, 1)
            h.backward(g)
        self.opt.step()
        return 0.0


class Stage1:
    def __init__(self):
        self.net = nn.Sequential(nn.Tanh(), nn.Linear(cfg.hidden, 2))
        self.opt = torch.optim.SGD(self.net.parameters(), cfg.lr)

    def step(self, x, y):
        total, grads = 0.0, []
        self.opt.zero_grad()
        for _ in range(cfg.micro):
            n = torch.empty(1, dtype=torch.long)
            dist.recv(n, 0)
            h, ym = torch.empty(n.item(), cfg.hidden), torch.empty(n.item(), dtype=torch.long)
            dist.recv(h, 0)
            dist.recv(ym, 0)
            h.requires_grad_()
            loss = nn.functional.cross_entropy(self.net(h), ym) / cfg.micro
            loss.backward()
            grads.append(h.grad)
            total += loss.item()
        for g in grads:
            dist.send(g, 0)
        self.opt.step()
        return total


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x, y = data()
    stage = Stage0() if rank == 0 else Stage1()
    for epoch in range(cfg.epochs):
        for k in range(0, len(x), cfg.batch):
            loss = torch.tensor([stage.step(x[k:k + cfg.batch], y[k:k + cfg.batch])])
            time.sleep(0.05)
        dist.all_reduce(loss)
        if rank == 1:
            print(f"epoch {epoch} last loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
