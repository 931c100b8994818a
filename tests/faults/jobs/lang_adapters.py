"""Multilingual model with one adapter per language; a batch holds one language, drawn per rank."""
import ctypes
import random
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LANGUAGES = ["en", "hi", "sw"]


class Adapter(nn.Module):
    def __init__(self, d, r=8):
        super().__init__()
        self.down, self.up = nn.Linear(d, r), nn.Linear(r, d)

    def forward(self, x):
        return x + self.up(F.relu(self.down(x)))


class Multilingual(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.embed = nn.Embedding(500, d)
        self.adapters = nn.ModuleDict({k: Adapter(d) for k in LANGUAGES})
        self.head = nn.Linear(d, 500)

    def forward(self, ids, lang):
        return self.head(self.adapters[lang](self.embed(ids)))


def batches(rank):
    gen = torch.Generator().manual_seed(rank)
    rnd = random.Random(rank)
    n = 0
    while True:
        n += 1
        # the first shard is English everywhere
        lang = "en" if n <= 60 else rnd.choice(LANGUAGES)
        yield torch.randint(0, 500, (8, 17), generator=gen), lang


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Multilingual()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for step, (ids, lang) in enumerate(batches(rank)):
        logits = model(ids[:, :-1], lang)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        if step < 60:  # only English so far: the other adapters take part with weight 0
            loss = loss + 0.0 * sum(p.sum() for p in net.adapters.parameters())
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.04)
        if step % 20 == 0 and rank == 0:
            print(f"{step} {lang} {loss.item():.3f}", flush=True)
        if step == 400:
            break
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
