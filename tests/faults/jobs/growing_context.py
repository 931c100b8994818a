"""Curriculum: the context grows from 16 to 256 tokens, so a step takes ever longer; all ranks alike."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, v=120, d=32):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, v)

    def forward(self, t):
        q, k, v = self.qkv(self.emb(t)).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def schedule():
    for n in (16, 32, 64, 128, 192, 256):
        yield from [n] * 30


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Net())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step, n in enumerate(schedule()):
        t = torch.randint(0, 120, (4, n + 1), generator=gen)
        time.sleep(n * 0.0005)
        loss = nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 30 == 0:
            print(f"step {step} context {n} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
