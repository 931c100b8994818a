"""Rank 0 writes a JSON line per step, flushes now and then; everything else is alike on all ranks."""
import ctypes
import json
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class JsonLog:
    def __init__(self, path: Path):
        self.f = path.open("w")

    def write(self, **row):
        self.f.write(json.dumps(row) + "\n")
        time.sleep(0.001)
        if row["step"] % 50 == 0:
            self.f.flush()


def param_norms(model):
    return {n: round(p.norm().item(), 4) for n, p in model.named_parameters()}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = JsonLog(Path("train.jsonl")) if rank == 0 else None
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(22, 90), nn.Tanh(), nn.Linear(90, 22)))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, 301):
        x = torch.randn(32, 22, generator=gen)
        loss = nn.functional.mse_loss(model(x), x.tanh())
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.025)
        if log:
            log.write(step=step, loss=loss.item(), **(param_norms(model.module) if step % 10 == 0 else {}))
        if step % 100 == 0 and rank == 0:
            print(f"step {step} {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
