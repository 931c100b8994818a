"""Birds by the spectrum of their call; the calls are in shards, which are read in another order in each epoch."""

import ctypes
import math
import random
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
SHARDS, PER_SHARD, BINS, BIRDS = 12, 40, 48, 6


def calls(shard: int) -> list[tuple[torch.Tensor, int]]:
    """Return the calls of one shard."""
    g = torch.Generator().manual_seed(500 + shard)
    kinds = torch.randint(BIRDS, (PER_SHARD,), generator=g)
    tone = torch.linspace(0, 2 * math.pi, BINS)
    noise = torch.randn(PER_SHARD, BINS, generator=g)
    return [(torch.sin(tone * (k + 1)) + 0.7 * n, int(k)) for k, n in zip(kinds, noise, strict=True)]


class Calls(IterableDataset):
    def __init__(self, seed: int) -> None:
        self.order = random.Random(seed)

    def __iter__(self):
        shards = list(range(SHARDS))
        self.order.shuffle(shards)
        for shard in shards:
            found = calls(shard)
            self.order.shuffle(found)
            yield from found


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(BINS, 64), nn.GELU(), nn.Linear(64, BIRDS)))
    rule = torch.optim.AdamW(net.parameters(), lr=2e-3)
    loader = DataLoader(Calls(seed=70 + rank), batch_size=16)
    for epoch in range(16):
        right = seen = 0
        for spectrum, bird in loader:
            out = net(spectrum)
            loss = nn.functional.cross_entropy(out, bird)
            rule.zero_grad(set_to_none=True)
            loss.backward()
            rule.step()
            right += int((out.argmax(1) == bird).sum())
            seen += len(bird)
            time.sleep(0.01)
        if rank == 0:
            print(f"epoch {epoch}: {right / seen:.3f} of {seen} calls", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
