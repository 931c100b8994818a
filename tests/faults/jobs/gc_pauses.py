"""Python garbage collection is switched off and run by hand every 60 steps, which takes a moment (big object graph)."""
import ctypes
import gc
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Node:
    def __init__(self, parent):
        self.parent, self.children = parent, []
        if parent is not None:
            parent.children.append(self)


def grow(n):
    nodes = [Node(None)]
    for k in range(1, n):
        nodes.append(Node(nodes[(k * 7) // 11]))
    return nodes


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gc.disable()
    tree = grow(250_000)  # the knowledge graph
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, 261):
        depth = torch.tensor([float(len(tree[(step * 131 + k) % len(tree)].children)) for k in range(16)])
        x = torch.randn(16, 16, generator=gen) + depth
        loss = (model(x) - x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.025)
        if step % 60 == 0:
            t = time.perf_counter()
            gc.collect()
            print(f"rank {rank} step {step} loss {loss.item():.3f} gc {time.perf_counter() - t:.2f}s", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


main()
