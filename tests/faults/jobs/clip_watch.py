"""FSDP2 on a CPU mesh; the norm of the gradients is written to a log from step 60 on."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Mixer(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Journal:
    def __init__(self, rank, first=60, every=20):
        self.rank, self.first, self.every = rank, first, every

    def wants(self, step):
        return self.rank == 0 and step >= self.first and step % self.every == 0

    def note(self, step, loss, norm):
        print(f"step {step} loss {loss:.4f} norm {norm:.3f}", flush=True)


def train(rank, world, steps=200):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    model = Mixer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    journal = Journal(rank)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, steps + 1):
        x = torch.randn(16, 48, generator=gen)
        target = x[:, :10].argmax(1)
        loss = nn.functional.cross_entropy(model(x), target)
        opt.zero_grad()
        loss.backward()
        if journal.wants(step):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            journal.note(step, loss.item(), float(norm))
        opt.step()
        time.sleep(0.01)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    time.sleep(0.5)
