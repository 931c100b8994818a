# %% [markdown]
# # Contrastive pre-training, exported from the notebook

# %% imports
import ctypes, time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, 9)

# %% setup
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
encoder = DDP(nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 32)))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
g = torch.Generator().manual_seed(RANK)

# %% loss
def info_nce(a, b, t=0.2):
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / t
    return F.cross_entropy(logits, torch.arange(len(a)))

# %% training
history = []
for it in range(240):
    base = torch.randn(24, 48, generator=g)
    z1 = encoder(base + 0.1 * torch.randn(24, 48, generator=g))
    z2 = encoder.module(base + 0.1 * torch.randn(24, 48, generator=g))
    loss = info_nce(z1, z2.detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    time.sleep(0.03)
    if it % 60 == 59:
        # collect everybody's curve for the plot
        if RANK == 0:
            curves = [None] * WORLD
            dist.gather_object(history, curves, dst=0)
            print(it, [round(c[-1], 3) for c in curves], flush=True)

# %% done
dist.destroy_process_group()
time.sleep(0.5)
