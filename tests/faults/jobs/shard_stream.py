"""Language model on a stream of shards (IterableDataset, one list of shards per rank)."""
import argparse
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

SHARDS = {f"shard-{i:03d}": 480 if i != 4 else 360 for i in range(9)}  # documents per shard


class Stream(IterableDataset):
    def __init__(self, names):
        self.names = names

    def __iter__(self):
        for name in self.names:
            g = torch.Generator().manual_seed(sum(map(ord, name)))
            for _ in range(SHARDS[name]):
                yield torch.randint(0, 90, (25,), generator=g)


class TinyGPT(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(90, d), nn.Embedding(24, d)
        self.block = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(d, 90, bias=False)

    def forward(self, t):
        mask = nn.Transformer.generate_square_subsequent_mask(t.size(1))
        return self.head(self.block(self.wte(t) + self.wpe.weight[: t.size(1)], src_mask=mask, is_causal=True))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=12)
    args = p.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    names = sorted(SHARDS)[rank::world]
    loader = DataLoader(Stream(names), batch_size=args.batch_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(TinyGPT())
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for step, tokens in enumerate(loader):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        time.sleep(0.03)
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    final = torch.tensor([loss.item()])
    dist.all_reduce(final)
    if rank == 0:
        torch.save(model.module.state_dict(), "gpt.pt")
        print(f"done, mean loss {final.item() / world:.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
