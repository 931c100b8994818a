"""Ranks that their launcher ends once no line of the script runs in them are not lost; any other end still is one.

Launchers that run tasks in workers end the idle workers from outside: Ray (`ray.kill`: exit code 1), pools, notebooks' kernels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.jobs import closed, free_port, rows, start

pytestmark = [pytest.mark.job, pytest.mark.timeout(200)]

POOL = """
import multiprocessing, os, signal, sys, time
import torch, torch.distributed as dist

def train(rank, port, leaves):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x = torch.ones(10)
    for step in range(30):
        time.sleep(0.02)
        dist.all_reduce(x)
    if leaves:
        dist.destroy_process_group()

def saves():
    time.sleep(60)  # HERE

def reduces():
    dist.all_reduce(torch.ones(10))

if __name__ == "__main__":
    method, group, end, port = sys.argv[1:]
    pools = [multiprocessing.get_context(method).Pool(1) for _ in range(2)]
    tasks = [pool.apply_async(train, (rank, port, group == "left")) for rank, pool in enumerate(pools)]
    for task in tasks:
        task.get()
    pids = [pool._pool[0].pid for pool in pools]
    time.sleep(1.0)
    if end == "exit":
        for pool in pools:
            pool.apply_async(os._exit, (1,))
            time.sleep(1.5)
        os._exit(0)
    if end == "kill_a_rank_that_saves":
        pools[0].apply_async(saves)
        time.sleep(2.0)
        pids = pids[:1]
    elif end == "kill_a_rank_that_another_waits_for":
        os.kill(pids.pop(), signal.SIGKILL)
        pools[0].apply_async(reduces)
        time.sleep(4.0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(1.5)
    os._exit(0)
"""


def findings(tmp_path: Path, *arguments: str) -> tuple[list[dict], str]:
    """Run the script; return the findings above info, and the state of the job."""
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    run = tmp_path / "run"
    env = {"DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(run)}
    with start([sys.executable, str(script), *arguments, str(free_port())], cwd=tmp_path, env=env) as job:
        assert job.wait() == 0, job.tail()
        closed(run)
    found = [json.loads(text) for (text,) in rows(run, "SELECT json FROM finding WHERE severity != 'info'")]
    return found, rows(run, "SELECT value FROM meta WHERE key = 'state'")[0][0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("group", ["left", "kept"])
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_workers_that_are_ended_when_their_work_is_done_are_not_lost(
    tmp_path: Path, method: str, group: str, end: str
) -> None:
    assert findings(tmp_path, method, group, end) == ([], "ended")


def test_a_rank_that_is_killed_at_work_after_it_left_its_group_is_lost(tmp_path: Path) -> None:
    (lost,), state = findings(tmp_path, "spawn", "left", "kill_a_rank_that_saves")
    line = POOL[: POOL.index("# HERE")].count("\n") + 1
    assert (lost["kind"], lost["culprits"], [w["line"] for w in lost["where"]]) == ("rank_lost", [0], [line])
    assert state == "failed"


def test_an_idle_rank_is_lost_if_another_needs_it(tmp_path: Path) -> None:
    (lost,), state = findings(tmp_path, "spawn", "kept", "kill_a_rank_that_another_waits_for")
    assert (lost["kind"], lost["culprits"], state) == ("rank_lost", [1], "failed")


LEAVES = """
import os, sqlite3, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
database, until = os.environ["DISTDIAG_RUN_DIR"] + "/run.db", time.monotonic() + 60

def watched():
    try:
        return sqlite3.connect(database).execute("SELECT count(*) FROM rank WHERE life = 'running'").fetchone()[0] == 2
    except sqlite3.Error:
        return False

ready = torch.zeros(1)
while ready < 2:  # both ranks see that the monitor knows both
    ready.fill_(watched() or time.monotonic() > until)
    dist.all_reduce(ready)
    time.sleep(0.05)
dist.destroy_process_group()
os._exit(5)
"""


def test_a_rank_that_ends_itself_with_a_code_has_not_ended_normally(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    env = {"DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "leaves.py"]
    with start(command, cwd=tmp_path, env=env) as job:
        assert job.wait() != 0, job.tail()
        closed(tmp_path / "run")
    found = [
        json.loads(text) for (text,) in rows(tmp_path / "run", "SELECT json FROM finding WHERE severity = 'error'")
    ]
    assert [f["kind"] for f in found] == ["rank_lost"] and "ended with exit code 5" in found[0]["message"]
