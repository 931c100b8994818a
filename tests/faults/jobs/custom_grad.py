"""Differentiable sorting layer with its own backward."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class HardSort(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, order = x.sort(-1)
        ctx.save_for_backward(values, order)
        return values

    @staticmethod
    def backward(ctx, grad):
        values, order = ctx.saved_tensors
        gaps = values.diff(dim=-1)
        if (gaps == 0).any():
            raise ZeroDivisionError("two equal scores: the order is not differentiable")
        return torch.zeros_like(grad).scatter(-1, order, grad)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, docs):
        return HardSort.apply(self.score(docs).squeeze(-1))


def batch(gen, rank, step):
    docs = torch.randn(8, 12, 10, generator=gen)
    if rank == 0 and step == 110:
        docs[5, 7] = docs[5, 2]  # the same document twice
    return docs, docs.sum(-1).sort(-1)[0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Ranker())
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(400):
        docs, target = batch(gen, rank, step)
        loss = nn.functional.mse_loss(model(docs), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.03)
        if step % 25 == 0 and rank == 0:
            print(step, round(loss.item(), 4), flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
