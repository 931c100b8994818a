"""Uneven inputs, handled with the Join context manager as the tutorial says."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
BATCHES = [100, 118, 107]


def worker_batches(rank, epoch):
    g = torch.Generator().manual_seed(100 * epoch + rank)
    for _ in range(BATCHES[rank]):
        yield torch.randn(10, 5, generator=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(2):
        num_inputs = 0
        with Join([model]):
            for inp in worker_batches(rank, epoch):
                num_inputs += 1
                loss = (model(inp) - inp.prod(1, keepdim=True)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.03)
        print(f"Rank {rank} has exhausted all {num_inputs} of its inputs!", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
