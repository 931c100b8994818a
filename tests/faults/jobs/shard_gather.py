"""Shards a table over the workers; all of them gather it, one writes it."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(32, 64)
        self.right = nn.Linear(64, 8)

    def forward(self, x):
        return self.right(torch.relu(self.left(x)))


def gather(model):
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Table()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(1, 91):
        loss = model(torch.randn(8, 32)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if step % 30 == 0:
            state = gather(model)
            if rank == 0:
                torch.save(state, f"table_{step}.pt")
                print("exported", step, os.path.getsize(f"table_{step}.pt"), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
