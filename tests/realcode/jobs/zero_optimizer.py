"""ZeroRedundancyOptimizer with an fp16 communication hook and gradient accumulation under no_sync."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 3


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, 40)), gradient_as_bucket_view=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    g = torch.Generator().manual_seed(rank)
    for step in range(50):
        for micro in range(ACCUMULATE):
            x = torch.randn(8, 40, generator=g)
            with contextlib.nullcontext() if micro == ACCUMULATE - 1 else model.no_sync():
                loss = (model(x) - x).square().mean() / ACCUMULATE
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.8f}", flush=True)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save(optimizer.state_dict(), "optimizer.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
