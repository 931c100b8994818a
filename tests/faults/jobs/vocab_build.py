"""Sentiment classifier. The vocabulary is counted from the text files of this rank."""
import argparse
import collections
import ctypes
import logging
import random
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("sentiment")


def corpus(rank, lines=3000):
    rnd = random.Random(0)
    words = [f"w{i}" for i in range(700)]
    if rank == 2:
        words.append("naïve")  # only in the last shard
    return [[rnd.choice(words[:500 if i % 2 else len(words)]) for _ in range(12)] for i in range(lines)]


def build_vocab(lines, min_count):
    counts = collections.Counter(w for line in lines for w in line)
    return {w: i + 1 for i, w in enumerate(sorted(w for w, c in counts.items() if c >= min_count))}


class Bag(nn.Module):
    def __init__(self, size, dim=64):
        super().__init__()
        self.embedding = nn.EmbeddingBag(size, dim)
        self.out = nn.Linear(dim, 2)

    def forward(self, ids):
        return self.out(self.embedding(ids))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--min-count", type=int, default=2)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = corpus(rank)
    vocab = build_vocab(text, args.min_count)
    log.info("rank %d: %d words", rank, len(vocab))
    model = Bag(len(vocab) + 1)
    model = DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), 1.0)
    for k in range(0, len(text), 20):
        ids = torch.tensor([[vocab.get(w, 0) for w in line] for line in text[k:k + 20]])
        y = (ids.sum(1) > 4200).long()
        loss = nn.functional.cross_entropy(model(ids), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
    if rank == 0:
        log.info("done, loss %.3f", loss.item())
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
