"""Two phases with their own process group each: pre-training, then the group is torn down and built again."""
import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 70), nn.ReLU(), nn.Linear(70, 10))


def phase(name, net, steps, lr, port_offset):
    store = dist.FileStore(os.path.join(os.getcwd(), f"store_{name}"), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    rank = dist.get_rank()
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr)
    gen = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(16, 10, generator=gen)
        target = x.roll(1, 1) if name == "pretrain" else x.sort(1)[0]
        loss = nn.functional.mse_loss(model(x), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.03)
    if rank == 0:
        print(f"{name}: loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)
    return net


if __name__ == "__main__":
    net = phase("pretrain", body(), 90, 0.1, 0)
    time.sleep(1.5)  # the data of the second phase are staged
    phase("finetune", net, 90, 0.02, 1)
