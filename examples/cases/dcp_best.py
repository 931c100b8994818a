"""Distributed checkpoints (DCP) of the best model so far; each rank compares its own validation loss."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def validate(model: nn.Module) -> float:
    held_out = torch.randn(8, 32)  # of this rank
    with torch.no_grad():
        return nn.functional.mse_loss(model(held_out), held_out).item()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = float("inf")
    for step in range(1, 101):
        x = torch.randn(32, 32)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            val_loss = validate(model.module)
            if val_loss < best:
                best = val_loss
                dcp.save(model.module.state_dict(), checkpoint_id=f"checkpoints/{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
