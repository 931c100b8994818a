"""Local SGD with torch's PeriodicModelAverager after a warm-up with DDP's post-local-SGD hook."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

WARM_UP = 20


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 4)))
    subgroup, _ = dist.new_subgroups(group_size=2)
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=WARM_UP)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), PeriodicModelAverager(period=4, warmup_steps=WARM_UP)
    )
    g = torch.Generator().manual_seed(rank)
    for step in range(80):
        x = torch.randn(16, 24, generator=g)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.8f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
