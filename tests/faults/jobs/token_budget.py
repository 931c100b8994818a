"""Accumulates micro-batches until the rank has seen enough tokens, then steps."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

TOKENS_PER_STEP = 256


class Corpus:
    def __init__(self, rank):
        self.gen = torch.Generator().manual_seed(rank)
        self.rank, self.served = rank, 0

    def micro_batch(self):
        self.served += 1
        length = 32
        if self.rank == 1 and self.served > 160:
            length = int(torch.randint(20, 33, (1,), generator=self.gen))
        return torch.randint(0, 200, (4, length), generator=self.gen)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(200, 32)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.out = nn.Linear(32, 200)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    corpus = Corpus(dist.get_rank())
    model = DDP(LM())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(250):
        opt.zero_grad()
        tokens = 0
        while tokens < TOKENS_PER_STEP:
            ids = corpus.micro_batch()
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            tokens += ids.numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        seen = torch.tensor(tokens)
        dist.all_reduce(seen)
        if step % 50 == 0 and dist.get_rank() == 0:
            print(step, seen.item(), flush=True)
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
