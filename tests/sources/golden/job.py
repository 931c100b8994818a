"""Two ranks that end in a known situation; each writes its flight recorder as JSON (without stacks) to DIRECTORY/RANK.

    torchrun --nproc-per-node 2 job.py SITUATION BACKEND DIRECTORY PORT

BACKEND: `nccl` (the stand-in for the old NCCL group), `nccl2`, or `plain`, a backend that reports no completion.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

what, backend, folder, port = sys.argv[1:]
here = Path(folder)
hangs = False  # gloo would end the process where calls do not match


class Plain(c10d.Backend):
    """gloo under another name: torch's hook records it, and learns of no completion."""

    def __init__(self, options):
        super().__init__(options.group_rank, options.group_size)
        self.inner = c10d.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    def allreduce(self, tensors, opts):
        if hangs:
            return c10d._create_work_from_future(torch.futures.Future())
        return self.inner.allreduce(tensors, opts)

    def broadcast(self, tensors, opts):
        if hangs:
            return c10d._create_work_from_future(torch.futures.Future())
        return self.inner.broadcast(tensors, opts)

    def recv(self, tensors, source, tag):
        return self.inner.recv(tensors, source, tag)

    def all_to_all_single(self, out, tensor, out_splits, splits, opts):
        return self.inner.alltoall_base(out, tensor, out_splits, splits, opts)

    alltoall_base = all_to_all_single

    def getBackendName(self):
        return "plain"


def dump():
    if backend == "nccl":
        return c10d._dump_nccl_trace_json(True, False)
    return c10d._dump_fr_trace_json(True, False, backend=backend)


if backend == "plain":
    dist.Backend.register_backend("plain", lambda o, _: Plain(o), extended_api=True, devices=["cpu"])
dist.init_process_group("plain" if backend == "plain" else "nccl", timeout=timedelta(minutes=10))
rank = dist.get_rank()
store = dist.TCPStore("127.0.0.1", int(port), 2, rank == 0)
x = torch.ones(8)
for _ in range(3):
    dist.all_reduce(x)
    x.sum().item()
if what == "uneven":
    splits = [1, 7] if rank == 0 else [7, 1]
    dist.all_to_all_single(torch.zeros(8), x, splits, splits)
    dist.all_reduce(x)
    x.sum().item()
hangs = what in ("order", "size")
if what == "missing" and rank == 0:
    dist.all_reduce(x, async_op=True)
if what == "order":
    dist.all_reduce(x, async_op=True) if rank == 0 else dist.broadcast(x, 0, async_op=True)
if what == "size":
    dist.all_reduce(x if rank == 0 else x[:4].clone(), async_op=True)
if what == "message" and rank == 0:
    dist.irecv(x, 1)
time.sleep(1.5)  # longer than the period of any watchdog
text = dump()
(here / str(rank)).write_bytes(text if isinstance(text, bytes) else text.encode())
store.set(f"written{rank}", "1")
store.get(f"written{1 - rank}")
if rank == 0:
    store.get("left")  # the store ends with this process
else:
    store.set("left", "1")
os._exit(0)
