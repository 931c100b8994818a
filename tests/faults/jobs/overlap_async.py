"""Data parallel by hand with overlap: gradients of step k are reduced while step k+1 computes (delayed SGD)."""
import ctypes
import time

import torch
import torch.distributed as dist
import torch.nn as nn

ctypes.CDLL(None).prctl(1, 9)


class Delayed:
    """Keeps the reduction of the last step in flight and applies it one step later."""

    def __init__(self, net, lr):
        self.params = list(net.parameters())
        self.lr, self.pending = lr, None
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def launch(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        self.pending = (flat, dist.all_reduce(flat, async_op=True))

    def finish(self):
        if self.pending is None:
            return
        flat, work = self.pending
        work.wait()
        at = 0
        for p in self.params:
            p.data -= self.lr * flat[at:at + p.numel()].view_as(p) / dist.get_world_size()
            at += p.numel()
        self.pending = None


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 50))
    sgd = Delayed(net, 0.05)
    gen = torch.Generator().manual_seed(rank)
    for step in range(160):
        x = torch.randn(16, 50, generator=gen)
        loss = (net(x) - x.roll(1, 1)).pow(2).mean()
        for p in sgd.params:
            p.grad = None
        loss.backward()
        time.sleep(0.04)  # augmentation of the next batch while the network is busy
        sgd.finish()
        sgd.launch()
        if step % 40 == 0 and rank == 0:
            time.sleep(0.3)
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    sgd.finish()
    dist.destroy_process_group()
    time.sleep(0.5)


main()
