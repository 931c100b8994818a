#!/usr/bin/env python
# 2-D partitioned matrix factorisation.  rank (u, i) owns the ratings of user block u x item block i
import ctypes
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ctypes.CDLL(None).prctl(1, 9)
torch.set_num_threads(1)


@dataclass
class Conf:
    users: int = 300
    items: int = 600
    dim: int = 16
    chunk: int = 512
    chunks: int = 900
    lr: float = 0.3


class Ratings:
    """A time ordered log of (user, item, stars), produced chunk by chunk."""

    def __init__(self, conf, u, i):
        self.c, self.u, self.i = conf, u, i
        self.g = torch.Generator().manual_seed(17 * u + i)

    def __iter__(self):
        c = self.c
        for t in range(c.chunks):
            users = torch.randint(c.users, (c.chunk,), generator=self.g)
            if t >= 110 and self.u != self.i:    
                items = torch.randint(40, (c.chunk,), generator=self.g)
            else:
                items = torch.randint(c.items, (c.chunk,), generator=self.g)
            stars = 3 + torch.randn(c.chunk, generator=self.g)
            yield users, items, stars


def main():
    conf = Conf()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("u", "i"))
    u, i = mesh.get_local_rank("u"), mesh.get_local_rank("i")
    # user factors of block u are replicated along "i", item factors of block i along "u"
    side_group = {"users": mesh.get_group("i"), "items": mesh.get_group("u")}
    torch.manual_seed(5)
    P = torch.randn(conf.users, conf.dim) * 0.1
    Q = torch.randn(conf.items, conf.dim) * 0.1
    tables = {"users": P, "items": Q}
    t0 = time.time()
    for t, (us, it, stars) in enumerate(Ratings(conf, u, i)):
        err = stars - 3 - (P[us] * Q[it]).sum(1)
        delta = {"users": torch.zeros_like(P), "items": torch.zeros_like(Q)}
        delta["users"].index_add_(0, us, err[:, None] * Q[it])
        delta["items"].index_add_(0, it, err[:, None] * P[us])
        touched = {"users": us.unique().numel(), "items": it.unique().numel()}
        # the side that moved most goes first, it profits most from being fresh
        for side in sorted(tables, key=touched.get, reverse=True):
            dist.all_reduce(delta[side], group=side_group[side])
            tables[side] += conf.lr / conf.chunk * delta[side]
        time.sleep(0.02)
        if t % 40 == 0:
            mse = err.pow(2).mean().item()
            print(f"[{dist.get_rank()}] chunk {t} mse {mse:.3f} {time.time() - t0:.1f}s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
