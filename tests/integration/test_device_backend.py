"""Jobs on a backend where collectives do not block the host, as on NCCL: the stand-in `stream`."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import REPOSITORY, launch, rows, wait_for

pytestmark = [
    pytest.mark.job,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("c++") is None, reason="the stand-in needs a C++ compiler"),
]

# The host leaves every call at once; it waits for the device where it reads a result.
SCRIPT = """
    import sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world, what = dist.get_rank(), dist.get_world_size(), sys.argv[1]
    a, b = dist.new_group(list(range(world))), dist.new_group(list(range(world)))
    x = torch.ones(8)

    def average(group=None):
        dist.all_reduce(x, group=group)  # average
        return (x / world).sum().item()  # read

    for group in (None, a, b) * 8:
        average(group)
    if what == "missing" and rank == 0:
        dist.broadcast(x, 0)  # extra
    if what == "groups":
        first, second = (a, b) if rank == 0 else (b, a)
        dist.all_reduce(x, group=first)  # first
        dist.all_reduce(x, group=second)
        x.sum().item()
    if what == "healthy":
        if rank == 1:  # computes on its CPU while the other's device waits for it
            end = time.monotonic() + 4
            y = torch.rand(64, 64)
            while time.monotonic() < end:
                y = (y @ y).clamp(-1, 1)
        works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(50)]  # the host runs ahead
        time.sleep(2)
        for work in works:
            work.wait()
    for _ in range(20):
        average()
    dist.destroy_process_group()
"""


def start(tmp_path: Path, what: str) -> Any:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = {"PYTHONPATH": str(REPOSITORY / "tests" / "standins" / "stream")}
    return launch(["-m", "distdiag.run", "--run-dir", tmp_path / "R", script, what], nproc=2, cwd=tmp_path, env=env)


def findings(tmp_path: Path, where: str = "1") -> list[dict[str, Any]]:
    return [json.loads(text) for (text,) in rows(tmp_path / "R", f"SELECT json FROM finding WHERE {where}")]


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(textwrap.dedent(SCRIPT).splitlines(), 1) if f"# {text}" in line)


def proved(tmp_path: Path, what: str) -> dict[str, Any]:
    with start(tmp_path, what) as job:
        certain = "severity = 'error' AND certainty = 'proved'"
        return wait_for(lambda: findings(tmp_path, certain), 90, "a proof", job)[0]


def places(found: dict[str, Any]) -> set[tuple[int, int, str]]:
    return {(w["rank"], w["line"], w["state"]) for w in (*found["where"], *found["waiting"])}


def test_an_extra_broadcast_of_one_rank(tmp_path: Path) -> None:
    found = proved(tmp_path, "missing")
    assert (found["kind"], found["culprits"], found["victims"]) == ("deadlock", [0], [1])
    assert {(0, line_of("extra"), "waiting"), (1, line_of("average"), "waiting")} <= places(found)
    assert (1, line_of("read"), "waits_for_device") in places(found)


def test_two_groups_in_opposite_order_that_both_hosts_have_issued(tmp_path: Path) -> None:
    found = proved(tmp_path, "groups")
    assert (found["kind"], found["cause"]) in (("deadlock", "group_cycle"), ("mismatch", "group"))
    assert {(0, line_of("first"), "waiting"), (1, line_of("first"), "waiting")} <= places(found)


def test_a_host_that_computes_and_one_that_runs_ahead_are_no_finding(tmp_path: Path) -> None:
    with start(tmp_path, "healthy") as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")
    assert findings(tmp_path, "severity != 'info'") == []
