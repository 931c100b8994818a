"""A model cut into three stages; activations and gradients travel by send and recv, with a held-out batch now and then."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
WIDTH, ROWS, MICRO = 40, 8, 3


class Link:
    """What one stage exchanges with its neighbours."""

    def __init__(self, stage, stages):
        self.before = stage - 1 if stage else None
        self.after = stage + 1 if stage + 1 < stages else None

    def take(self, source):
        box = torch.empty(ROWS, WIDTH)
        dist.recv(box, source)
        return box

    def give(self, tensor, target):
        dist.send(tensor.detach().contiguous(), target)


class Stage(nn.Module):
    def __init__(self, stage, stages):
        super().__init__()
        torch.manual_seed(stage)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.link = Link(stage, stages)

    def through(self, batch):
        x = batch if self.link.before is None else self.link.take(self.link.before).requires_grad_()
        y = self.body(x)
        if self.link.after is not None:
            self.link.give(y, self.link.after)
        return x, y

    def back(self, x, y):
        if self.link.after is None:
            loss = y.square().mean() / MICRO
            loss.backward()
        else:
            loss = None
            y.backward(self.link.take(self.link.after))
        if self.link.before is not None:
            self.link.give(x.grad, self.link.before)
        return loss


@torch.no_grad()
def held_out(stage, batch):
    stage.eval()
    _, y = stage.through(batch)
    stage.train()
    return y.square().mean().item()


def fit(rank, world, steps=200, every=70):
    stage = Stage(rank, world)
    opt = torch.optim.SGD(stage.parameters(), lr=0.02)
    data = torch.Generator().manual_seed(11)
    for step in range(1, steps + 1):
        opt.zero_grad()
        kept = [stage.through(torch.randn(ROWS, WIDTH, generator=data)) for _ in range(MICRO)]
        losses = [stage.back(x, y) for x, y in kept]
        opt.step()
        time.sleep(0.02)
        if step % every == 0 and stage.link.after is None:
            score = held_out(stage, torch.randn(ROWS, WIDTH))
            print(f"step {step} loss {sum(losses).item():.4f} held out {score:.4f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    fit(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    time.sleep(0.5)
