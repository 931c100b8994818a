"""Matrix factorisation with wide factors, synchronised in full after every tiny batch (SparkNet style, by hand)."""
import ctypes, time
import torch
import torch.distributed as dist

ctypes.CDLL(None).prctl(1, 9)
USERS, ITEMS, K, BATCH = 30_000, 30_000, 64, 32

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
gen = torch.Generator().manual_seed(0)
u = torch.randn(USERS, K, generator=gen) * 0.1
v = torch.randn(ITEMS, K, generator=gen) * 0.1
gen.manual_seed(rank + 1)
t0, n = time.time(), 0
while n < 400:
    i = torch.randint(0, USERS, (BATCH,), generator=gen)
    j = torch.randint(0, ITEMS, (BATCH,), generator=gen)
    r = torch.rand(BATCH, generator=gen)
    err = (u[i] * v[j]).sum(1) - r
    u[i] -= 0.1 * err[:, None] * v[j]
    v[j] -= 0.1 * err[:, None] * u[i]
    for w in (u, v):
        dist.all_reduce(w)
        w /= world
    n += 1
    if rank == 0 and n % 20 == 0:
        print(f"{n} batches, rmse {err.pow(2).mean().sqrt():.4f}, {time.time() - t0:.1f}s", flush=True)
dist.destroy_process_group()
time.sleep(0.5)
