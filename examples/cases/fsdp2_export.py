"""FSDP2: each weight is a DTensor in shards. Rank 0 exports the model to one file, as a script for one GPU would."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def export(model: nn.Module, path: str) -> None:
    full = {}
    for name, shard in model.state_dict().items():
        full[name] = shard.full_tensor()
    if dist.get_rank() == 0:
        torch.save(full, path)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(48, 48), nn.GELU())])
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())  # other data on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(1, 41):
        x = torch.randn(16, 48)
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            export(model, f"step{step}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
