"""Two ranks on the stand-in for nccl2; asserts what its caller and a reader of its flight recorder see."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

DEADLINE_S = 60.0


def until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def entries(backend="nccl2"):
    return json.loads(c10d._dump_fr_trace_json(True, False, backend=backend)).get("entries", [])


def newest(n):
    return [(e["profiling_name"], e["state"], e["retired"]) for e in entries()[-n:]]


dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.group.WORLD
other = 1 - rank
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, rank == 0)
x = torch.ones(4)

# the recorder is torch's hook, under the backend's name; the recorders of gloo and of the old group have nothing
assert world._get_backend(torch.device("cpu")).name() == "nccl2"
dist.all_reduce(x)
assert x.tolist() == [2.0] * 4
assert [e["profiling_name"] for e in entries()] == ["nccl2:all_reduce"]
assert not entries("gloo") and "entries" not in json.loads(c10d._dump_nccl_trace_json(True, False))

# an operation is retired when the watchdog has seen it complete, and not before
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() and not work.is_completed()
    time.sleep(1.5)  # more than the watchdog's period
    assert newest(1) == [("nccl2:all_reduce", "scheduled", False)]
    store.set("seen", "1")
else:
    store.get("seen")
    dist.all_reduce(x)
assert x[0].item() == 4.0
until(lambda: newest(1) == [("nccl2:all_reduce", "completed", True)])

# a synchronous operation returns its work to torch, too; a barrier blocks the host
assert world.allreduce([x]) is not None
x.sum().item()
dist.barrier()
assert newest(1)[0][0] == "nccl2:barrier" and entries()[-1]["input_sizes"] == []

# lists as the caller gave them; an uneven exchange has another name
split = [1, 3] if rank == 0 else [3, 1]
dist.all_gather([torch.zeros(4), torch.zeros(4)], x)
dist.all_to_all_single(torch.zeros(4), x, split, split)
gather, exchange = entries()[-2:]
assert gather["output_sizes"] == [[4], [4]]
assert exchange["profiling_name"] == "nccl2:all_to_all_single"

# the communicator is made with its group; a rank that is not a member takes part
if rank == 0:
    dist.new_group([0])
    store.set("left", "1")
else:
    time.sleep(1.0)
    assert not store.check(["left"])
    dist.new_group([0])
    store.get("left")
halves = dist.split_group(split_ranks=[[0], [1]])
assert halves.size() == 1
dist.all_reduce(x, group=halves)

# the operations of a batch are complete at once; a coalesced collective takes a number
before = world._get_sequence_number_for_group()
got = torch.zeros(4)
if rank == 0:
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, 1)])
    assert newest(1) == [("nccl2:recv 0<-1", "completed", True)] and not works[0].is_completed()
    store.set("batch", "1")
else:
    store.get("batch")
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0)])
for work in works:
    work.wait()
x.sum().item()
assert world._get_sequence_number_for_group() == before  # messages take none
with dist._coalescing_manager(device=torch.device("cpu")):
    dist.broadcast(x, 0)
    dist.broadcast(got, 0)
assert world._get_sequence_number_for_group() == before + 2
got.sum().item()

# the watchdog's thread is not named
names = {p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")}
assert "pt_nccl_watchdg" not in names, names

# a message runs on the communicator of the group: in the other order than the collective of its peer, it hangs
dist.barrier()
big = torch.ones(2_000_000)  # more than a send can leave in a buffer
if rank == 0:
    message = dist.isend(big, 1)
    work = dist.all_reduce(x, async_op=True)
else:
    work = dist.all_reduce(x, async_op=True)
    message = dist.irecv(big, 0)
time.sleep(1.5)
assert not work.is_completed() and not message.is_completed()
store.set(f"end{rank}", "1")
store.get(f"end{other}")
print("done", flush=True)
threading.Event().wait(0.5)  # torchrun sees both
os._exit(0)
