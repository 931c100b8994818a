"""Sequence tagger with one head per language; gradients are averaged by hand."""
import ctypes
import random
import signal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
torch.set_num_threads(1)

LANGUAGES = ["de", "fr", "fi"]


class Tagger(nn.Module):
    def __init__(self, vocab=800, width=48, tags=9):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.heads = nn.ModuleDict({"de": nn.Linear(width, tags), "fr": nn.Linear(width, tags + 3), "fi": nn.Linear(width, tags + 6)})

    def forward(self, batch):
        loss = 0.0
        for lang, (x, y) in batch.items():
            h, _ = self.rnn(self.emb(x))
            loss = loss + F.cross_entropy(self.heads[lang](h).flatten(0, 1), y.flatten())
        return loss / len(batch)


def draw(rng, step):
    """A handful of sentences; Finnish is rare in this corpus."""
    batch = {}
    for lang in LANGUAGES:
        n = sum(rng.random() < (0.75 if lang != "fi" else 0.45) for _ in range(8))
        if n:
            x = torch.randint(0, 800, (n, 24))
            batch[lang] = (x, x % 9)
    return batch


def average(model):
    n = dist.get_world_size()
    for p in model.parameters():
        if p.grad is None:
            continue
        dist.all_reduce(p.grad)
        p.grad /= n


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Tagger()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    rng = random.Random(32 + rank)
    torch.manual_seed(100 + rank)
    for step in range(4000):
        batch = draw(rng, step)
        opt.zero_grad(set_to_none=True)
        model(batch).backward()
        average(model)
        opt.step()
        if step % 50 == 0 and rank == 0:
            print("step", step, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
