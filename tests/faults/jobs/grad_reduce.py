"""Word vectors (CBOW), own data parallel wrapper with an 'owner' rank that applies the update."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

VOCAB, DIM, WINDOW = 1500, 48, 4


class Cbow:
    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.inp = (torch.rand(VOCAB, DIM, generator=g) - 0.5).requires_grad_()
        self.out = torch.zeros(VOCAB, DIM).requires_grad_()

    @property
    def tables(self):
        return [self.inp, self.out]

    def loss(self, ctx, mid):
        return F.cross_entropy(self.inp[ctx].mean(1) @ self.out.T, mid)


def reduce_grads(tables, owner):
    """Only the owner needs the sum; the others get the new weights with the next broadcast."""
    me = dist.get_rank()
    for t in tables:
        if me == owner:
            dist.all_reduce(t.grad)
        else:
            dist.reduce(t.grad, dst=owner)


def share(tables, owner):
    for t in tables:
        dist.broadcast(t.data, src=owner)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Cbow(0)
    gen = torch.Generator().manual_seed(rank)
    share(model.tables, 0)
    for step in range(300):
        ctx = torch.randint(0, VOCAB, (64, 2 * WINDOW), generator=gen)
        mid = torch.randint(0, VOCAB, (64,), generator=gen)
        loss = model.loss(ctx, mid)
        loss.backward()
        time.sleep(0.05)
        if step < 60:  # warm-up with plain averaging
            for t in model.tables:
                dist.all_reduce(t.grad)
        else:
            reduce_grads(model.tables, owner=step % world)
        with torch.no_grad():
            for t in model.tables:
                t -= 0.5 * t.grad / world
                t.grad = None
        if step >= 60:
            share(model.tables, step % world)
        if step % 20 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    main()
