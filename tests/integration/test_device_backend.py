"""Jobs on a backend where collectives do not block the host, as on NCCL: the stand-in `stream`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from tests.jobs import REPOSITORY, Job, launch, rows, wait_for
from tests.standins import needs_stream

pytestmark = [
    pytest.mark.job,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("c++") is None, reason="the stand-in needs a C++ compiler"),
    needs_stream,
]

# True if the stand-in imitates nccl2: by default where torch's `nccl` does
NCCL2 = (
    hasattr(distributed_c10d, "_maybe_attach_flight_recorder") and os.environ.get("STANDIN_NCCL", "nccl2") == "nccl2"
)
# The host returns from every call at once; it waits for the device where it reads a result.
SCRIPT = """
    import json, os, sys, threading, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from stream_backend import device, graph
    from torch._C import _distributed_c10d as c10d

    timeout = 10 if sys.argv[1] == "mismatch" else 600
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    rank, world, what = dist.get_rank(), dist.get_world_size(), sys.argv[1]
    a, b = dist.new_group(list(range(world))), dist.new_group(list(range(world)))
    x = torch.ones(8)

    def average(group=None):
        dist.all_reduce(x, group=group)  # average
        return (x / world).sum().item()  # read

    for group in (None, a, b) * 8:
        average(group)
    with graph.capture() as captured:  # takes a number, and is never enqueued
        dist.all_reduce(x)
    for _ in range(40):  # no counter moves
        captured.replay()
        x.fill_(1.0)
        time.sleep(0.02)
    if what == "missing" and rank == 0:
        dist.broadcast(x, 0)  # extra
    if what == "groups":
        first, second = (a, b) if rank == 0 else (b, a)
        dist.all_reduce(x, group=first)  # first
        dist.all_reduce(x, group=second)
        x.sum().item()
    if what == "split" and rank == 0:
        dist.new_group([0])  # split
    def freeze_until(file):
        # the watchdogs have noticed all so far, and notice the timeout once the file is there
        def thaw():
            while not os.path.exists(file):
                time.sleep(0.05)
            device.freeze_watchdogs(False)
        def groups():
            if dist.group.WORLD._get_backend(torch.device("cpu")).name() == "nccl2":
                return json.loads(c10d._dump_fr_trace_json(False, False, backend="nccl2"))["pg_status"].values()
            return json.loads(c10d._dump_nccl_trace_json(False, False))["pg_status"].values()
        while any(g["last_completed_collective"] != g["last_enqueued_collective"] for g in groups()):
            time.sleep(0.01)
        device.freeze_watchdogs(True)
        open(f"frozen{rank}", "w").close()
        threading.Thread(target=thaw, daemon=True).start()

    if what == "mismatch":
        average()  # torch's hook counts the captured operation as complete only with the next one
        freeze_until("thaw")
        if rank == 0:
            dist.all_reduce(x)  # all of it
        else:
            dist.all_reduce(x[:4].clone())  # a part: completes alone, with the first half of the other
            dist.all_reduce(x)
        x.sum().item()
    if what == "messages":
        big = torch.ones(2_000_000)  # more than a send can leave in a buffer
        dist.send(big, 1 - rank)  # sends
        dist.recv(big, 1 - rank)
        big.sum().item()
    if what == "batch":
        if rank == 0:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)]):  # one end
                work.wait()
        else:
            dist.recv(x, 0)  # the other end
        x.sum().item()
    if what == "busy" and rank == 1:
        device.busy(x, 600)
        x.sum().item()  # its own work
    if what == "healthy":
        device.freeze_watchdogs(rank == 0)  # its counters stand, its host does not
        for _ in range(60):
            average()
            time.sleep(0.02)
        if rank == 1:  # computes on its CPU while the other's device waits for it
            end = time.monotonic() + 4
            y = torch.rand(64, 64)
            while time.monotonic() < end:
                y = (y @ y).clamp(-1, 1)
        works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(50)]  # the host runs ahead
        time.sleep(2)
        for work in works:
            work.wait()
        device.freeze_watchdogs(False)
    for _ in range(20):
        average()
    dist.destroy_process_group()
"""


def start(tmp_path: Path, what: str, **env: str) -> Any:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env["PYTHONPATH"] = str(REPOSITORY / "tests" / "standins" / "stream")
    command = ["-m", "distdiag.run", "--run-dir", tmp_path / "R", script, what]
    # the watchdog ends the ranks of a mismatch, as torchrun sees it; STANDIN_EAGER is read when torch is imported
    forked = what != "mismatch" and "STANDIN_EAGER" not in env
    return launch(command, nproc=2, cwd=tmp_path, env=env, timeout=200, fork_ranks=forked)


def findings(tmp_path: Path, where: str = "1") -> list[dict[str, Any]]:
    return [json.loads(text) for (text,) in rows(tmp_path / "R", f"SELECT json FROM finding WHERE {where}")]


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(textwrap.dedent(SCRIPT).splitlines(), 1) if f"# {text}" in line)


def proved(tmp_path: Path, what: str, **env: str) -> dict[str, Any]:
    with start(tmp_path, what, **env) as job:
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


def test_two_ranks_that_send_before_they_receive(tmp_path: Path) -> None:
    found = proved(tmp_path, "messages")
    assert (found["kind"], found["cause"], found["culprits"]) == ("deadlock", "p2p_cycle", [])
    assert {(0, line_of("sends"), "waiting"), (1, line_of("sends"), "waiting")} <= places(found)


def test_a_batched_message_and_a_single_one_match_on_one_communicator_only(tmp_path: Path) -> None:
    """The old NCCL group executes them on two communicators, and the send leaves its rank free; nccl2 has one for all."""
    if NCCL2:
        with start(tmp_path, "batch") as job:
            assert job.wait() == 0, job.tail()
            wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")
        assert findings(tmp_path, "severity != 'info'") == []
        return
    found = proved(tmp_path, "batch")
    assert found["kind"] == "deadlock" and (1, line_of("the other end"), "waiting") in places(found)
    assert "batch_isend_irecv at both ends" in found["advice"]


def test_a_group_split_off_the_default_one_needs_its_non_members_too(tmp_path: Path) -> None:
    found = proved(tmp_path, "split", STANDIN_EAGER="1")
    assert found["kind"] == "deadlock"
    assert {(0, line_of("split"), "waiting"), (1, line_of("average"), "waiting")} <= places(found)


@pytest.mark.timeout(400)
def test_a_mismatch_is_proved_before_and_after_the_watchdog_ends_the_job(tmp_path: Path) -> None:
    for attempt in range(4):
        where = tmp_path / str(attempt)
        where.mkdir()
        with start(where, "mismatch", TORCH_FR_DUMP_TEMP_FILE=str(where / "dump_")) as job:
            if not _frozen(where, job):
                continue
            wait_for(lambda where=where: findings(where, "severity = 'error'"), 90, "a proof", job)
            (where / "thaw").touch()
            assert job.wait() != 0
            assert ("timeout watchdog detected" if NCCL2 else "Watchdog caught collective operation") in job.stderr()
            wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")
        break
    else:
        pytest.fail("the watchdogs never noticed all operations")
    (found,) = findings(where, "severity = 'error'")
    assert (found["kind"], found["cause"], found["certainty"]) == ("mismatch", "shape", "proved")
    assert {(0, line_of("all of it"), "waiting"), (1, line_of("a part"), "waiting")} <= places(found)
    (first,) = diagnosed(where / "R")  # all ranks have ended
    assert (first["kind"], first["cause"], set(first["culprits"]) | set(first["victims"])) == (
        "mismatch",
        "shape",
        {0, 1},
    )
    dumps = sorted(where.glob("dump_*"))  # at least that of the rank whose watchdog was first
    shown = {w["file"] for f in diagnosed(*dumps) for w in (*f["where"], *f["waiting"]) if w["file"]}
    assert dumps and shown <= {str(where / "train.py")}


def _frozen(where: Path, job: Job) -> bool:
    """True once both ranks have stopped their watchdogs.

    On a busy machine torch's hook for nccl2 sometimes counts the last operation as complete only with the next one. Then a rank waits
    for its counters for ever, before the calls that this test is about.
    """
    try:
        wait_for(lambda: all((where / f"frozen{rank}").exists() for rank in (0, 1)), 45, "frozen watchdogs", job)
    except AssertionError:
        return False
    return True


def diagnosed(*left: Path) -> list[dict[str, Any]]:
    """Return what a later `diagnose` finds in a run directory or in dumps, without info findings."""
    command = [sys.executable, "-m", "distdiag", "diagnose", "--json", *map(str, left)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [f for f in json.loads(done.stdout)["findings"] if f["severity"] != "info"]


def test_a_device_that_is_busy_with_other_work_is_a_stall_of_that_device(tmp_path: Path) -> None:
    with start(tmp_path, "busy") as job:
        found = wait_for(lambda: findings(tmp_path, "severity != 'info'"), 180, "a finding", job)[0]
    assert (found["kind"], found["culprits"], found["victims"]) == ("stall", [1], [0])
    assert "rank 1" in found["message"] and "waits for its own device" in found["message"]
    assert (1, line_of("its own work"), "device") in places(found)


def test_a_host_that_computes_and_one_that_runs_ahead_are_no_finding(tmp_path: Path) -> None:
    with start(tmp_path, "healthy") as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: not job.monitor_pids(), 30, "the monitor to write its last rows")
    assert findings(tmp_path, "severity != 'info'") == []
