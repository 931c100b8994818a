"""DISTDIAG=1 records a job whatever launched it: its ranks find one run, and no two jobs share one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs import clean_env, free_port, rows, start, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(200)]

# Rank 1 makes one broadcast more. `how` is the launcher, or how the script gives itself its ranks.
SCRIPT = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
how, port, extra = sys.argv[1], sys.argv[2], sys.argv[3] == "hangs"

def train(**group):
    if not dist.is_initialized():
        dist.init_process_group("gloo", **group)
    x = torch.ones(10)
    for step in range(20):
        time.sleep(0.02)
        if extra and step == 10 and dist.get_rank() == 1:
            dist.broadcast(x, src=0)
        dist.all_reduce(x)
    dist.destroy_process_group()

def spawned(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    train()

if __name__ == "__main__":
    if how == "launcher":
        train()
    elif how == "mesh":
        torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        train()
    elif how == "spawn":
        torch.multiprocessing.spawn(spawned, nprocs=2)
    else:
        rank = int(how)
        if len(sys.argv) > 4:
            other = subprocess.Popen([sys.executable, sys.argv[0], "1", *sys.argv[2:4]])
        train(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS = {
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], "launcher", "1"),
    "logs_specs": ([*TORCHRUN, "--logs-specs", "distdiag"], "launcher", None),
    "launch": (["-m", "torch.distributed.launch", "--use-env", "--nproc_per_node", "2"], "launcher", "1"),
    "mesh": (TORCHRUN, "mesh", "1"),  # init_device_mesh makes the process group
    "spawn": ([], "spawn", "1"),
    "by_hand": ([], "0", "1"),
    "run_by_hand": (["-m", "distdiag.run"], "0", None),
    "run_and_spawn": (["-m", "distdiag.run"], "spawn", None),  # children that are spawned inherit DISTDIAG=1
    "run_and_variable": ([*TORCHRUN, "-m", "distdiag.run"], "launcher", "1"),
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def command(script: Path, before: Sequence[str], how: str, port: int, hangs: bool = True) -> list[str]:
    starts_other = ["both"] if how == "0" else []
    given = ["--master_port", str(port)] if "torch.distributed.launch" in before else []
    return [sys.executable, *before, *given, str(script), how, str(port), "hangs" if hangs else "ends", *starts_other]


def runs_of(cwd: Path) -> list[Path]:
    return [p for p in (cwd / "reports").glob("2*") if p.is_dir()]


def verdict(run: Path) -> tuple[list[int], int] | None:
    """Return (culprits of the first error, ranks seen)."""
    found = rows(run, "SELECT json FROM finding WHERE severity = 'error'")
    seen = rows(run, "SELECT count(*) FROM rank WHERE life != 'missing'")
    return (json.loads(found[0][0])["culprits"], seen[0][0]) if found else None


@pytest.mark.parametrize("way", WAYS)
def test_every_launcher_leads_to_one_run_with_its_verdict(script: Path, tmp_path: Path, way: str) -> None:
    before, how, variable = WAYS[way]
    env = {"DISTDIAG": variable} if variable else {}
    with start(command(script, before, how, free_port()), cwd=tmp_path, env=env) as job:
        wait_for(lambda: runs_of(tmp_path), 60, "a run", job)
        (run,) = runs_of(tmp_path)
        assert wait_for(lambda: verdict(run), 60, "the verdict", job) == ([1], 2)
    assert runs_of(tmp_path) == [run]


def test_two_terminals_share_a_run_and_the_next_job_on_their_port_has_its_own(script: Path, tmp_path: Path) -> None:
    port = free_port()
    for jobs in (1, 2):
        with ExitStack() as stack:
            ranks = [
                # each from its own shell, with its own parent
                stack.enter_context(
                    start(
                        ["sh", "-c", f"{sys.executable} {script} {rank} {port} ends; true"],
                        cwd=tmp_path,
                        env={"DISTDIAG": "1"},
                    )
                )
                for rank in (0, 1)
            ]
            for rank in ranks:
                assert rank.wait() == 0, rank.tail()
            wait_for(lambda: all(ended(run) for run in runs_of(tmp_path)), 60, "the monitors' end")
        assert len(runs_of(tmp_path)) == jobs
    assert [rows(run, "SELECT count(*) FROM rank WHERE life != 'missing'") for run in runs_of(tmp_path)] == [[(2,)]] * 2


def ended(run: Path) -> bool:
    return rows(run, "SELECT value FROM meta WHERE key = 'monitor_ended'") == [("1",)]


def test_zero_switches_everything_off(script: Path, tmp_path: Path) -> None:
    attached = tmp_path / "attached.py"
    attached.write_text("import distdiag\nhandle = distdiag.attach()\nhandle.step()\nassert handle.run_dir is None\n")
    for arguments in (["-m", "distdiag.run", str(attached)], [str(attached)]):
        with start([sys.executable, *arguments], cwd=tmp_path, env={"DISTDIAG": "0"}) as job:
            assert job.wait() == 0, job.tail()
            assert job.stdout() + job.stderr() == ""
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize("value", ["1", "0", None])
def test_a_process_without_a_group_imports_no_recorder(tmp_path: Path, value: str | None) -> None:
    program = "import sys, torch; print(sorted(m for m in sys.modules if m.startswith('distdiag.')))"
    env = clean_env(tmp_path, {"DISTDIAG": value} if value else {})
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    imported = "['distdiag.everywhere', 'distdiag.torch_modules', 'distdiag.version']"
    assert done.stdout.strip() == (imported if value == "1" else "[]")


IN_A_THREAD = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train():
    model = DDP(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        if step == 10 and dist.get_rank() == 1:
            dist.barrier()  # HERE
"""


def test_a_worker_that_trains_in_a_thread_is_judged_by_that_thread(tmp_path: Path) -> None:
    """As in Ray Train: the main thread has no line of the user's, makes the group, and runs the training elsewhere."""
    (tmp_path / "training.py").write_text(IN_A_THREAD)
    program = (
        "from concurrent.futures import ThreadPoolExecutor; import training; training.dist.init_process_group('gloo'); "
        "ThreadPoolExecutor(1).submit(training.train).result()"
    )
    given = f"WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} PYTHONPATH={tmp_path} exec {sys.executable}"
    ranks = [f'(RANK={r} LOCAL_RANK={r} {given} -c "{program}") &' for r in range(2)]
    with start(["bash", "-c", " ".join([*ranks, "wait"])], cwd=tmp_path, env={"DISTDIAG": "1"}) as job:
        wait_for(lambda: runs_of(tmp_path), 60, "a run", job)
        (run,) = runs_of(tmp_path)
        assert wait_for(lambda: verdict(run), 60, "the verdict", job) == ([1], 2)
        found = json.loads(rows(run, "SELECT json FROM finding WHERE severity = 'error'")[0][0])
        line = IN_A_THREAD[: IN_A_THREAD.index("# HERE")].count("\n") + 1
        assert (1, line) in {(w["rank"], w["line"]) for w in (*found["where"], *found["waiting"])}
