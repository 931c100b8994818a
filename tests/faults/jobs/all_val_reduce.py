"""Trains a ranker; every worker validates on its own pairs and rank 0 prints the mean."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def reduce_mean(values):
    total = torch.tensor(values)
    dist.all_reduce(total)
    return total / dist.get_world_size()


@torch.no_grad()
def validate(net, pairs):
    net.eval()
    hits, margin = 0.0, 0.0
    for a, b in pairs:
        score = net(a) - net(b)
        hits += (score > 0).float().mean().item()
        margin += score.mean().item()
    net.train()
    return reduce_mean([hits / len(pairs), margin / len(pairs)])


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    held_out = [(torch.randn(16, 24), torch.randn(16, 24)) for _ in range(6)]
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, 121):
        a, b = torch.randn(16, 24, generator=gen) + 0.1, torch.randn(16, 24, generator=gen)
        loss = nn.functional.softplus(model(b) - model(a)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        if step % 60 == 0:
            accuracy, margin = validate(net, held_out)
            if rank == 0:
                print(f"step {step} accuracy {accuracy:.2f} margin {margin:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
