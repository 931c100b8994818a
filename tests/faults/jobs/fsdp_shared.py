"""FSDP2 with a sharded model; every rank takes part in the full checkpoint, rank 0 writes it."""
import argparse
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(depth, d):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(d, d), nn.GELU()) for _ in range(depth)), nn.Linear(d, d))


def checkpoint(model, path):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--depth", type=int, default=3)
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--steps", type=int, default=120)
    a = p.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(a.depth, a.dim)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, a.steps + 1):
        x = torch.randn(12, a.dim, generator=gen)
        loss = (model(x) - x.cumsum(1)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
        if step % 40 == 0:
            checkpoint(model, f"full_{step}.pt")
            if rank == 0:
                print(f"step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
