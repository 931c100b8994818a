"""DISTDIAG=1 under mpirun and srun, each with its own variables for the rank: one run, right ranks, its verdict; attach, too."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.attach.test_attach import needs_py_spy
from tests.jobs import Job, closed, distdiag, free_port, rows, start, wait_for
from tests.slurm import missing, slurm

pytestmark = [pytest.mark.job, pytest.mark.timeout(200)]

# Rank 1 leaves out one all_reduce. A script may give torch the launcher's numbers in torch's variables, or in the call.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
launcher, init, port, hangs = *sys.argv[1:4], sys.argv[4] == "hangs"
names = {"mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "srun": ("SLURM_PROCID", "SLURM_NTASKS")}[launcher]
rank, world = (int(os.environ[n]) for n in names)
if init == "variables":
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
x = torch.ones(10)
for step in range(20):
    time.sleep(0.02)
    if hangs and step == 10 and rank == 1:
        dist.barrier()
    dist.all_reduce(x)
dist.destroy_process_group()
"""
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"]


@contextmanager
def launched(tmp_path: Path, launcher: str, init: str, fate: str, env: dict[str, str]) -> Iterator[Job]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with ExitStack() as stack:
        before = MPIRUN
        if launcher == "srun":
            if why := missing():
                pytest.skip(why)
            short = stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-"))  # it holds a unix socket
            env = env | stack.enter_context(slurm(Path(short)))
            before = ["srun", "-n", "3"]
        elif shutil.which("mpirun") is None:
            pytest.skip("no mpirun (Debian: apt install openmpi-bin)")
        command = [*before, sys.executable, str(script), launcher, init, str(free_port()), fate]
        yield stack.enter_context(start(command, cwd=tmp_path, env=env))


def attach_to(job: Job, launcher: str) -> dict[str, Any]:
    """Attach by the launcher's pid; srun's is no parent of its ranks, which have the job's number in their environment."""
    named = str(job.process.pid) if launcher == "mpirun" else f"--job={os.getpid()}"
    return json.loads(distdiag("attach", named, "--json", timeout=90).stdout or "{}")


def the_run(tmp_path: Path, job: Job) -> Path:
    def found() -> list[Path]:
        return [p for p in (tmp_path / "reports").glob("2*") if p.is_dir()]

    wait_for(found, 60, "a run", job)
    (run,) = found()
    return run


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
@pytest.mark.parametrize("init", ["variables", "arguments"])
def test_a_hang_has_one_run_and_its_verdict(tmp_path: Path, launcher: str, init: str) -> None:
    with launched(tmp_path, launcher, init, "hangs", {"DISTDIAG": "1"}) as job:
        run = the_run(tmp_path, job)

        def verdict() -> dict[str, Any] | None:
            found = rows(run, "SELECT json FROM finding WHERE severity = 'error'")
            return json.loads(found[0][0]) if found else None

        found = wait_for(verdict, 60, "the verdict", job)
        assert (found["culprits"], found["certainty"]) == ([1], "proved")
        assert {(w["rank"], w["line"]) for w in found["where"]} == {(1, 16)}
        assert rows(run, "SELECT rank FROM rank WHERE life != 'missing' ORDER BY rank") == [(0,), (1,), (2,)]
        assert the_run(tmp_path, job) == run


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_a_healthy_job_has_one_run_without_a_finding(tmp_path: Path, launcher: str) -> None:
    with launched(tmp_path, launcher, "variables", "ends", {"DISTDIAG": "1"}) as job:
        assert job.wait() == 0, job.tail()
        run = the_run(tmp_path, job)
        closed(run)
        assert rows(run, "SELECT rank, life FROM rank ORDER BY rank") == [(r, "finished") for r in range(3)]
        assert [json.loads(text)["message"] for (text,) in rows(run, "SELECT json FROM finding")] == []


@needs_py_spy
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_attach_finds_the_ranks_of_an_unprepared_job(tmp_path: Path, launcher: str) -> None:
    with launched(tmp_path, launcher, "arguments", "hangs", {}) as job:

        def stands() -> dict[str, Any] | None:
            findings = attach_to(job, launcher).get("findings", ())
            shown = {(w["rank"], w["line"]) for f in findings for w in (*f["where"], *f["waiting"])}
            settled = len(findings) == 1 and shown >= {(0, 17), (1, 16), (2, 17)}
            return findings[0] if settled else None

        finding = wait_for(stands, 90, "the one verdict", job)
        assert (finding["culprits"], finding["certainty"]) == ([1], "suspected")
