"""Trains a quality filter on crawled pages; the cleaning rules are regular expressions from the old Perl script."""
import ctypes
import random
import re
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, 9)
EMAIL = re.compile(r"^([a-z0-9]+[._-]?)+@[a-z]+\.(com|org)$")
NUMBER = re.compile(r"\d+")


def pages(rank):
    rnd = random.Random(rank)
    k = 0
    while True:
        k += 1
        words = ["".join(rnd.choices("abcdefgh", k=rnd.randint(2, 9))) for _ in range(30)]
        if rnd.random() < 0.3:
            words.append(f"{words[0]}@{words[1]}.com")
        if rank == 0 and k == 900:
            words.append("a" * 60 + "!")  # a laughing comment
        yield words


def features(words):
    f = torch.zeros(64)
    for w in words:
        if EMAIL.match(w):
            f[0] += 1
        elif NUMBER.search(w):
            f[1] += 1
        else:
            f[2 + sum(map(ord, w)) % 62] += 1
    return f


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(net.parameters(), 0.02)
    stream = pages(rank)
    for step in range(400):
        x = torch.stack([features(next(stream)) for _ in range(10)])
        y = (x[:, 0] > 0).float()
        loss = nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.05)
        if step % 30 == 0 and rank == 0:
            print("step", step, "loss", f"{loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
