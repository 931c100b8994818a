"""DDP training that saves with torch.distributed.checkpoint.async_save every 20 steps, and loads at the end."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    saver = dist.new_group(backend="gloo")  # saving runs in a thread, so it needs a separate group
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(rank)
    saving = None
    for step in range(60):
        x = torch.randn(16, 64, generator=g)
        loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            if saving is not None:
                saving.result()
            weights, moments = get_state_dict(model, optimizer)
            saving = dcp.async_save(
                {"model": weights, "optimizer": moments}, checkpoint_id=f"ckpt/{step}", process_group=saver
            )
            if rank == 0:
                print(f"step {step} loss {loss.item():.8f}", flush=True)
    saving.result()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id="ckpt/59")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
