"""A pipeline of two stages with torch.distributed.pipelining and the GPipe schedule."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WIDTH, MICRO, BATCH = 48, 4, 16


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = nn.Sequential(*[layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=MICRO, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(7)
    for step in range(50):
        x = torch.randn(BATCH, WIDTH, generator=g)
        y = x.roll(1, 1)
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        if losses and step % 10 == 0:
            print(f"step {step} loss {torch.stack(losses).mean().item():.8f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
