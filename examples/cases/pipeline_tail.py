"""A pipeline of two stages: microbatches go to the next stage by send and recv, into a buffer of fixed shape."""

import torch
import torch.distributed as dist
from torch import nn

WIDTH, MICRO, BATCH = 32, 4, 16


def batches(samples: int) -> list[torch.Tensor]:
    data = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(7))
    return list(data.split(BATCH))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for batch in batches(samples=25 * BATCH + 10):
        for micro in batch.chunk(MICRO):
            if rank == 0:
                out = stage(micro)
                dist.send(out.detach(), dst=1)
                grad = torch.empty_like(out)
                dist.recv(grad, src=1)
                out.backward(grad)
            else:
                x = torch.empty(BATCH // MICRO, WIDTH)
                dist.recv(x, src=0)
                x.requires_grad_()
                nn.functional.mse_loss(stage(x), x.detach()).backward()
                dist.send(x.grad, dst=0)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
