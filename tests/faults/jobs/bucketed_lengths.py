"""Translation toy: batches of sentences of one length, the same lengths in the same order on all ranks, short last batch."""
import ctypes
import random
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset


class Bitext(Dataset):
    def __init__(self, n):
        rnd = random.Random(3)
        self.lens = [rnd.choice([8, 16, 24, 48, 64]) for _ in range(n)]

    def __len__(self):
        return len(self.lens)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randint(0, 60, (self.lens[i],), generator=g)


class LengthBuckets(BatchSampler):
    def __init__(self, data, tokens, rank, world):
        self.data, self.tokens, self.rank, self.world, self.epoch = data, tokens, rank, world, 0

    def __iter__(self):
        rnd = random.Random(self.epoch)
        batches = []
        for length in sorted(set(self.data.lens)):
            idx = [i for i, l in enumerate(self.data.lens) if l == length]
            rnd.shuffle(idx)
            size = self.tokens // length
            whole = len(idx) // self.world * self.world
            share = [idx[r:whole:self.world] for r in range(self.world)][self.rank]
            batches += [share[k:k + size] for k in range(0, len(share), size)]
        random.Random(self.epoch).shuffle(batches)
        return iter(batches)

    def __len__(self):
        return sum(1 for _ in iter(self))


class Copy(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.emb = nn.Embedding(60, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, 60)

    def forward(self, t):
        return self.out(self.rnn(self.emb(t))[0])


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Bitext(1500)
    batch_sampler = LengthBuckets(data, 256, rank, world)
    loader = DataLoader(data, batch_sampler=batch_sampler)
    torch.manual_seed(0)
    model = DDP(Copy())
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    for epoch in range(2):
        batch_sampler.epoch = epoch
        for k, t in enumerate(loader):
            loss = F.cross_entropy(model(t).flatten(0, 1), t.flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            time.sleep(0.02)
        if rank == 0:
            print(f"epoch {epoch} {k + 1} batches loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
