"""Language identification. Every rank takes the languages assigned to it in LANGS."""
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

LANGS = {0: ["de", "fr", "it"], 1: ["fi"], 2: ["es", "pt", "ro"]}
SENTENCES = 40


def load(lang, epoch):
    """Sentences of one language which are not in the seen-list yet."""
    g = torch.Generator().manual_seed(hash_lang(lang) + epoch)
    if lang == "fi" and epoch >= 2:
        return torch.empty(0, 24, dtype=torch.long)  # a small corpus, everything is used up
    return torch.randint(0, 256, (SENTENCES, 24), generator=g)


def hash_lang(s):
    return sum(ord(c) * 31**i for i, c in enumerate(s))


class LangId(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(256, 64)
        self.fc = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

    def forward(self, t):
        return self.fc(self.emb(t))


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = DDP(LangId())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(8):
        langs = LANGS[rank]
        pool = torch.cat([load(l, epoch) for l in langs])
        if len(pool) == 0:
            print(f"rank {rank}: nothing left to train on, bye", flush=True)
            sys.exit(0)
        for step in range(60):
            idx = torch.randint(0, len(pool), (10,))
            y = torch.full((10,), rank)
            loss = nn.functional.cross_entropy(model(pool[idx]), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.025)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
