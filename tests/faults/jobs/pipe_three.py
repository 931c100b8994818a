"""Three pipeline stages with send/recv, one forward one backward; later stages idle in the bubble, which is normal."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
MICRO, B, H = 4, 8, 48


class Stage:
    def __init__(self, rank, world):
        self.first, self.last = rank == 0, rank == world - 1
        self.prev, self.next = rank - 1, rank + 1
        torch.manual_seed(rank)
        self.net = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))
        self.opt = torch.optim.SGD(self.net.parameters(), 0.05)

    def forward(self, x):
        if not self.first:
            x = torch.empty(B, H)
            dist.recv(x, self.prev)
            x.requires_grad_()
        y = self.net(x)
        if not self.last:
            dist.send(y.detach(), self.next)
        return x, y

    def backward(self, x, y):
        if self.last:
            loss = y.pow(2).mean() / MICRO
            loss.backward()
        else:
            g = torch.empty_like(y)
            dist.recv(g, self.next)
            y.backward(g)
            loss = torch.zeros(())
        if not self.first:
            dist.send(x.grad, self.prev)
        return loss.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, world)
    gen = torch.Generator().manual_seed(0)
    for step in range(100):
        stage.opt.zero_grad()
        time.sleep(0.02)
        live = [stage.forward(torch.randn(B, H, generator=gen)) for _ in range(MICRO)]
        loss = sum(stage.backward(x, y) for x, y in live)
        stage.opt.step()
        if stage.last and step % 20 == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


main()
