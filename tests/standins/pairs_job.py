"""Every rank sends to every other before it receives: the communicators of all pairs are made at the same time."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
sent = [dist.isend(torch.full((4,), float(rank)), (rank + d) % world) for d in range(1, world)]
for d in range(1, world):
    received = torch.zeros(4)
    dist.recv(received, (rank - d) % world)
    assert received.tolist() == [(rank - d) % world] * 4
for work in sent:
    work.wait()
dist.barrier()
dist.destroy_process_group()
