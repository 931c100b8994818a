import ctypes; ctypes.CDLL(None).prctl(1, 9)
"""Train small and narrow first: every stage uses more workers, bigger images and a fresh group."""
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)

# workers, image side, steps
STAGES = [(1, 8, 90), (2, 12, 80), (4, 16, 70), (2, 16, 60)]


def net():
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(),
        nn.Conv2d(10, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


def images(g, n, side):
    y = torch.randint(0, 5, (n,), generator=g)
    x = torch.randn(n, 3, side, side, generator=g) * 0.5
    x[:, 0] += (y.float() - 2).view(-1, 1, 1) * 0.4
    return x, y


def run_stage(core, pg, members, side, steps, rank):
    model = DDP(core, process_group=pg)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(1000 * side + rank)
    loss = torch.zeros(())
    for _ in range(steps):
        x, y = images(g, 8, side)
        time.sleep(0.025)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    avg = loss.detach().clone()
    dist.all_reduce(avg, group=pg)
    return avg.item() / len(members)


def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    core = net()
    for number, (workers, side, steps) in enumerate(STAGES):
        members = list(range(min(workers, world)))
        pg = dist.new_group(members)
        began = time.time()
        if rank in members:
            loss = run_stage(core, pg, members, side, steps, rank)
            if rank == 0:
                print(f"stage {number}: {workers} workers, side {side}, loss {loss:.3f}, "
                      f"{time.time() - began:.1f}s", flush=True)
        dist.barrier()
        for t in core.state_dict().values():
            dist.broadcast(t, src=0)
        if rank in members:
            dist.destroy_process_group(pg)
    final = torch.stack([p.detach().double().sum() for p in core.parameters()]).sum()
    sums = [torch.zeros_like(final) for _ in range(world)]
    dist.all_gather(sums, final)
    assert all(torch.equal(s, sums[0]) for s in sums)
    if rank == 0:
        torch.save(core.state_dict(), "team.pt")
        print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
