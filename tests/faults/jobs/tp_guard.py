"""Two data parallel replicas, each a tensor parallel pair; a batch with a bad label is not learned from."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
WIDTH = 32


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fall(torch.tanh(self.rise(x)))


def average(model, group):
    for p in model.parameters():
        grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        dist.all_reduce(grad, group=group)
        grad /= 2


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(Pair(), Pair(), nn.Linear(WIDTH, 4))
    for block in model[:2]:
        parallelize_module(block, mesh["shard"], {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    gen = torch.Generator().manual_seed(mesh["replica"].get_local_rank())
    for step in range(110):
        x = torch.randn(12, WIDTH, generator=gen)
        y = x[:, :4].argmax(1)
        if rank == 3 and step == 70:
            y[5] = -1  # a cosmic ray in host memory
        if (y < 0).any():
            print(f"step {step}: bad label, batch left out", flush=True)
            continue
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        average(model, mesh["replica"].get_group())
        opt.step()
        time.sleep(0.02)
        if rank == 0 and step % 25 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)


if __name__ == "__main__":
    main()
