"""Is the cluster all right? Three steps and out (runs before every big job)."""
import ctypes

ctypes.CDLL(None).prctl(1, 9)
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == dist.get_world_size()
model = DDP(torch.nn.Linear(4, 4))
torch.manual_seed(dist.get_rank())
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
if dist.get_rank() == 0:
    print("cluster ok", flush=True)
dist.destroy_process_group()
time.sleep(0.5)
