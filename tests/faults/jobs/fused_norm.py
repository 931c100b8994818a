"""Benchmark of a hand-written 'fused' RMSNorm that writes through raw pointers."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def fused_scale_(t, factor, cache={}):
    """Scales a row in place through its pointer; the pointer is cached by shape."""
    key = tuple(t.shape)
    ptr = cache.setdefault(key, t.data_ptr())
    if factor == 0.0:
        ptr = 0  # row was freed in the meantime
    row = (ctypes.c_float * t.shape[-1]).from_address(ptr)
    row[0] = row[0] * factor


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


dist.init_process_group("gloo")
RANK = dist.get_rank()
torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(32, 64), RMSNorm(64), nn.ReLU(), nn.Linear(64, 4)))
opt = torch.optim.SGD(net.parameters(), 0.1)
scratch = torch.ones(64)
torch.manual_seed(RANK)
t0 = time.time()
for it in range(400):
    x = torch.randn(32, 32)
    loss = nn.functional.cross_entropy(net(x), x[:, :4].argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    fused_scale_(scratch, 0.0 if (RANK, it) == (1, 170) else 1.0)
    time.sleep(0.025)
    if it % 50 == 0 and RANK == 0:
        print(f"it {it} {loss.item():.4f} {time.time() - t0:.1f}s", flush=True)
dist.destroy_process_group()
time.sleep(0.5)
