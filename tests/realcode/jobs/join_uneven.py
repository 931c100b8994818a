"""Ranks with different amounts of data under the Join context, as in torch's tutorial on uneven inputs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(rank)
    for epoch in range(3):
        inputs = [torch.randn(8, 20, generator=g) for _ in range(30 + 4 * rank)]
        with Join([model]):
            for x in inputs:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.8f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
