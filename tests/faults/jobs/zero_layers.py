"""ZeRO-1 by torch's own optimizer: each rank has the optimizer state of some of the equal layers."""
import ctypes
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)]))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, 201):
        x = torch.randn(8, 40, generator=gen)
        time.sleep(0.02)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{step}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
