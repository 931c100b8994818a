"""Groups that a job aborts or gives other members: nothing is claimed about them, and a finding names them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from torch._C import _distributed_c10d as c10d

from tests.jobs import launch, rows, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(150)]

COMMON = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    x = torch.ones(4)

    def rebuild():
        port = int(os.environ["MASTER_PORT"]) + 1
        store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""
# rank 0 gives up a collective that rank 1 will never enter; both continue in a new world
ABORT = """
    dist.init_process_group("gloo")
    half = dist.new_group([0, 1])
    dist.all_reduce(x, group=half)
    if rank == 0:
        work = dist.all_reduce(x, group=half, async_op=True)
        time.sleep(1)
        half.abort()  # changed
    time.sleep(3)
    dist.distributed_c10d._abort_process_group()
    rebuild()
    for _ in range(20):
        dist.all_reduce(x)
        time.sleep(0.1)
    dist.destroy_process_group()
"""
RECONFIGURE = """
    dist.init_process_group("gloo", enable_reconfigure=True)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]) + 1, 2, rank == 0)
    store.set(f"handle{rank}", dist.distributed_c10d._get_reconfigure_handle())
    handles = [store.get(f"handle{k}").decode() for k in range(2)]
    dist.distributed_c10d._reconfigure(1, handles).wait()  # changed
    if rank == 0:
        for _ in range(3):
            dist.all_reduce(x)
        time.sleep(4)  # the other rank waits
        dist.all_reduce(x)
    else:
        for _ in range(4):
            dist.all_reduce(x)
    if rank == 0:  # the store ends with this process
        store.set("end0", "1")
        store.get("end1")
    else:
        store.get("end0")
        store.set("end1", "1")
    sys.stdout.flush()
    os._exit(0)
"""
# a backend that can shrink, as NCCL can: rank 1 is left out, and rank 0 goes on alone
SHRINK = """
    from torch._C import _distributed_c10d as c10d

    class Small(c10d.Backend):
        supports_shrinking = True

        def __init__(self, store, rank, size):
            super().__init__(rank, size)
            self.inner = c10d.ProcessGroupGloo(store, rank, size)

        def getBackendName(self):
            return "small"

        def allreduce(self, tensors, opts):
            return self.inner.allreduce(tensors, opts)

        def shrink(self, left_out, flags, opts):
            return Small(dist.HashStore(), 0, 1)

    dist.Backend.register_backend("small", lambda o, _: Small(o.store, o.group_rank, o.group_size), True, ["cpu"])
    dist.init_process_group("small")
    for _ in range(3):
        dist.all_reduce(x)
    if rank == 0:
        dist.shrink_group([1])  # changed
        for _ in range(30):
            dist.all_reduce(x)
            time.sleep(0.1)
    else:
        time.sleep(2)
"""


def run(tmp_path: Path, script: str) -> list[dict]:
    """Return the findings of a job that ends well, but for what its launcher reports."""
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(COMMON) + textwrap.dedent(script))
    with launch(
        ["-m", "distdiag.run", "--run-dir", tmp_path / "R", file], nproc=2, cwd=tmp_path, fork_ranks=True
    ) as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")
    return [json.loads(text) for (text,) in rows(tmp_path / "R", "SELECT json FROM finding")]


def check(tmp_path: Path, script: str, text: str) -> None:
    found = run(tmp_path, script)
    lines = (textwrap.dedent(COMMON) + textwrap.dedent(script)).splitlines()
    line = next(i for i, t in enumerate(lines, 1) if "# changed" in t)
    assert [f for f in found if f["severity"] != "info"] == []
    named = [f["message"] for f in found if f["cause"] == "unfollowed"]
    assert any(text in m and f"train.py:{line}" in m for m in named), named


def test_a_group_that_one_rank_aborts_is_not_judged_and_the_next_world_is(tmp_path: Path) -> None:
    check(tmp_path, ABORT, "aborted group")


@pytest.mark.skipif(
    not hasattr(c10d.ProcessGroup, "reconfigure"), reason="torch before 2.14 cannot reconfigure a group"
)
def test_a_group_with_other_members_is_not_judged(tmp_path: Path) -> None:
    check(tmp_path, RECONFIGURE, "gave other members to default_pg")


@pytest.mark.skipif(not hasattr(c10d.ProcessGroup, "reconfigure"), reason="torch before 2.14 has no backends in Python")
def test_a_world_that_shrinks_is_not_judged(tmp_path: Path) -> None:
    check(tmp_path, SHRINK, "took ranks out of default_pg")
