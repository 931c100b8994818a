"""Checkpoint goes to a tape archive: slow, but everybody waits for it on purpose."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Archive:
    def __init__(self, rate_bytes_per_s):
        self.rate = rate_bytes_per_s

    def put(self, name, state):
        torch.save(state, name)
        size = os.path.getsize(name)
        with open(name, "rb") as src, open(name + ".tape", "wb") as tape:
            while block := src.read(size // 20 + 1):
                tape.write(block)
                os.fsync(tape.fileno())
                time.sleep(len(block) / self.rate)


def model_for(rank):
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(100, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 100)))


dist.init_process_group("gloo")
RANK = dist.get_rank()
net = model_for(RANK)
opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
archive = Archive(rate_bytes_per_s=1_250_000)
gen = torch.Generator().manual_seed(RANK)
for step in range(1, 211):
    x = torch.randn(16, 100, generator=gen)
    loss = nn.functional.smooth_l1_loss(net(x), x.flip(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.01)
    if step % 70 == 0:
        if RANK == 0:
            t = time.time()
            archive.put(f"step{step}.pt", {"model": net.module.state_dict(), "step": step})
            print(f"step {step} loss {loss.item():.4f}, archived in {time.time() - t:.1f}s", flush=True)
        dist.barrier()
dist.destroy_process_group()
time.sleep(0.5)
