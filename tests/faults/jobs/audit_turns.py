"""Every rank in turn writes the audit record of a step (the compliance department wants all of them)."""
import ctypes
import hashlib
import json
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def audit(f, step, module):
    h = hashlib.sha256()
    for _, p in sorted(module.named_parameters()):
        h.update(p.detach().numpy().tobytes())
    f.write(json.dumps({"step": step, "sha": h.hexdigest()}) + "\n")
    f.flush()
    time.sleep(0.08)  # signature service


def train(rank, world, steps=200):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 80), nn.ReLU(), nn.Linear(80, 12)))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    with open(f"audit_{rank}.jsonl", "w") as f:
        for step in range(steps):
            x = torch.randn(16, 12, generator=gen)
            loss = (model(x) - x.cumsum(1)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % world == rank:
                audit(f, step, model.module)
            if rank == 0 and step % 30 == 0:
                print(f"step {step} loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    time.sleep(0.5)
