"""Two ranks on the stand-in; asserts what a caller of NCCL sees. Rank 1 arrives after rank 0 has seen its condition."""

import json
import linecache
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from stream_backend import graph
from torch._C import _distributed_c10d as c10d

from distdiag.monitor.evidence.ask import ask

DEADLINE_S = 60.0


def until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def recorded(entries=True):
    return json.loads(c10d._dump_nccl_trace_json(entries, False))


def status():
    return next(iter(recorded(False)["pg_status"].values()), {})


def host_stands_at(marker):
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        if frame.f_code.co_filename == __file__ and linecache.getline(__file__, frame.f_lineno).endswith(
            f"# {marker}\n"
        ):
            return True
        frame = frame.f_back
    return False


def main_thread_cpu_ticks():
    fields = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def watched(condition, key):
    """Let rank 1 continue once another thread of rank 0 has seen `condition`: the waiting host does not hold the GIL."""

    def watch():
        until(condition)
        store.set(key, "1")

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.group.WORLD
# not the job's store: a rank that waits in it would block its connection
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, rank == 0)
ones = torch.ones(8)

# the first operation creates the communicator: the number is taken, nothing is recorded, the host waits
if rank == 0:
    watcher = watched(lambda: world._get_sequence_number_for_group() == 1 and "entries" not in recorded(), "came")
else:
    store.get("came")
assert dist.all_reduce(ones) is None
if rank == 0:
    watcher.join()
assert ones.tolist() == [2.0] * 8

# a synchronous operation returns None, wait() returns, and the host continues
if rank == 0:
    assert dist.all_reduce(ones) is None
    work = dist.all_reduce(ones, async_op=True)
    assert work.wait() and not work.is_completed()
    other = (torch.arange(4.0) * 2).sum().item()  # depends on nothing in flight
    until(lambda: status()["last_enqueued_collective"] == "3")
    until(lambda: status()["last_completed_collective"] == "1")
    ticks = main_thread_cpu_ticks()
    # ... until it reads the result: it spins there
    watcher = watched(lambda: host_stands_at("reads") and main_thread_cpu_ticks() > ticks + 5, "read")
    assert ones[0].item() == 8.0  # reads
    watcher.join()
    assert "libcudart.so.12" in Path("/proc/self/maps").read_text()
else:
    store.get("read")
    dist.all_reduce(ones)
    dist.all_reduce(ones)
    assert ones[0].item() == 8.0

# one number for a coalesced group; its operations stay scheduled
before = world._get_sequence_number_for_group()
a, b = torch.full((2,), float(rank)), torch.full((3,), float(rank))
with dist._coalescing_manager(device=torch.device("cpu")):
    dist.broadcast(a, 1)
    dist.broadcast(b, 1)
assert a.tolist() == [1.0, 1.0] and b.tolist() == [1.0, 1.0, 1.0]
assert world._get_sequence_number_for_group() == before + 1
until(lambda: status()["last_completed_collective"] == str(before + 1))
group = [e for e in recorded()["entries"] if e["collective_seq_id"] == before + 1]
assert [(e["profiling_name"], e["state"]) for e in group] == [
    ("nccl:broadcast", "scheduled"), ("nccl:broadcast", "scheduled"), ("nccl:coalesced", "completed"),
]  # fmt: skip

# messages have their own counter
got = torch.zeros(3)
for _ in range(2):
    dist.send(b, 1) if rank == 0 else dist.recv(got, 0)
assert rank == 0 or got.tolist() == [1.0, 1.0, 1.0]
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, b, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]):
    work.wait()
assert got.sum().item() == 3.0
assert world._get_sequence_number_for_group() == before + 1
messages = [e for e in recorded()["entries"] if e["is_p2p"]]
assert [e["p2p_seq_id"] for e in messages] == [1, 2, 3, 3, 3], messages
assert len({e["op_id"] for e in recorded()["entries"] if e["profiling_name"] != "nccl:coalesced"}) == 9

# a captured collective takes a number; its replays move no counter
x, n_entries, last = torch.ones(2), len(recorded()["entries"]), status()["last_enqueued_collective"]
with graph.capture() as captured:
    dist.all_reduce(x)
for _ in range(3):
    captured.replay()
assert x.tolist() == [8.0, 8.0]
assert world._get_sequence_number_for_group() == before + 2
assert len(recorded()["entries"]) == n_entries and status()["last_enqueued_collective"] == last

# a barrier blocks the host
if rank == 0:
    enqueued = str(before + 3)
    watcher = watched(lambda: host_stands_at("barrier") and status()["last_enqueued_collective"] == enqueued, "barrier")
    dist.barrier()  # barrier
    watcher.join()
else:
    store.get("barrier")
    dist.barrier()

entries = recorded()["entries"]
# the worker server answers with the same, also in builds of torch with their own handlers
with tempfile.TemporaryDirectory() as folder:
    server = c10d._WorkerServer(f"{folder}/s", -1)
    assert len(json.loads(ask(f"{folder}/s", "dump_nccl_trace_json"))["entries"]) == len(entries)
    server.shutdown()
assert all(e["time_discovered_started_ns"] == 0 for e in entries)  # no timing: no start
assert status()["last_started_collective"] == "-1"
dist.destroy_process_group()
print("done")
