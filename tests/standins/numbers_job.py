"""DDP, FSDP2, a pipeline, object and functional collectives: prints numbers that must not depend on the backend."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as DDP


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def train(name, model, steps=8):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(rank)
    for _ in range(steps):
        loss = (model(torch.randn(16, 8)) - torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, dist.ReduceOp.AVG if name != "gloo" and dist.get_backend() != "gloo" else dist.ReduceOp.SUM)
    if dist.get_backend() == "gloo":
        total /= world
    weights = sum(getattr(p, "_local_tensor", p).double().abs().sum() for p in model.parameters())
    lines.append(f"{name} {total.item():.9f} {weights.item():.9f}")


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
lines = []
train("ddp", DDP(net(), bucket_cap_mb=0.001))
train("ddp-unused", DDP(net(), find_unused_parameters=True))
compressed = DDP(net())
compressed.register_comm_hook(None, fp16_compress_hook)
train("ddp-hook", compressed)
sharded = net()
for i in (0, 3):
    fully_shard(sharded[i])
train("fsdp2", fully_shard(sharded))

torch.manual_seed(rank)
part = nn.Linear(8, 8)
schedule = Schedule1F1B(
    PipelineStage(part, rank, world, torch.device("cpu")), 4, loss_fn=lambda out, y: (out - y).square().mean()
)
torch.manual_seed(7)
x, y = torch.randn(16, 8), torch.randn(16, 8)
losses = []
schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
lines.append(f"pipeline {sum(loss.item() for loss in losses):.9f} {part.weight.grad.double().abs().sum().item():.9f}")

objects = [None] * world
dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
sent = [objects, rank] if rank == 1 else [None, None]
dist.broadcast_object_list(sent, src=1)
lines.append(f"objects {objects} {sent}")
summed = functional.all_reduce(torch.arange(4.0) + rank, "sum", dist.group.WORLD)
gathered = functional.all_gather_tensor(summed[:2] + rank, 0, dist.group.WORLD)
lines.append(f"functional {(summed * 2).tolist()} {gathered.tolist()}")
pieces = [torch.zeros(2) for _ in range(world)]
dist.all_gather(pieces, torch.full((2,), float(rank)))
swapped = torch.zeros(world)
dist.all_to_all_single(swapped, torch.arange(float(world)) + 10 * rank)
lines.append(f"lists {torch.stack(pieces).numpy().tolist()} {swapped.tolist()}")
dist.barrier()
sys.stdout.write("".join(f"{rank} {line}\n" for line in lines))  # in one write: both ranks share stdout
sys.stdout.flush()
dist.destroy_process_group()
