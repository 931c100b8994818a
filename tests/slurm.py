"""A Slurm of one machine for tests: munged, slurmctld and slurmd as children of the test, below one directory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
READY_S = 30.0
_CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmdPort={d}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
FirstJobId={first_job}
MpiDefault=none
ReturnToService=2
KillWait=2
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES State=UP
"""


def missing() -> str:
    """Return why no Slurm can be started here; empty if one can."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: apt install slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@contextmanager
def slurm(directory: Path, cpus: int = 4) -> Iterator[dict[str, str]]:
    """Start a Slurm with one node of `cpus` CPUs, however many the machine has; yield the variables by which `srun` finds it.

    Its first job has the number of this process: other tests may have a Slurm, too.

    Args:
        directory: An empty one, of at most 80 characters: it holds a unix socket.
    """
    for name in ("munge", "state", "spool"):
        (directory / name).mkdir(parents=True)
    key, host = directory / "munge" / "key", socket.gethostname().partition(".")[0]
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = {"ctld": (port := free_port()), "d": port + 1}
    config = directory / "slurm.conf"
    config.write_text(_CONFIG.format(host=host, at=directory, cpus=cpus, first_job=os.getpid(), **ports))
    # version 22.05 knows no `disabled`; v1 changes no cgroup unless a plugin of tracking or tasks asks for it
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    munge = [f"--{name}={directory}/munge/{file}" for name, file in (
        ("socket", "socket"), ("key-file", "key"), ("log-file", "log"), ("pid-file", "pid"), ("seed-file", "seed"))]  # fmt: skip
    variables = {"SLURM_CONF": str(config)}
    with ExitStack() as stack:
        _daemon(stack, directory, "munged", "--foreground", "--force", *munge)
        _wait(lambda: (directory / "munge" / "socket").exists(), directory)
        _daemon(stack, directory, "slurmctld", "-D", "-f", str(config))
        _daemon(stack, directory, "slurmd", "-D", "-f", str(config))
        stack.callback(_end_jobs, directory, {**os.environ, **variables})
        _wait(lambda: _idle(variables), directory)
        yield variables


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _daemon(stack: ExitStack, directory: Path, name: str, *options: str) -> None:
    program = _program(name)
    assert program is not None
    out = stack.enter_context((directory / f"{name}.out").open("wb"))
    process = subprocess.Popen([program, *options], stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _end_jobs(directory: Path, env: dict[str, str]) -> None:
    """End the jobs while the daemons run: without them, the process of a step waits for ever to report its end."""
    subprocess.run(["scancel", "--signal=KILL", "--full", "--me"], env=env, capture_output=True, check=False)
    subprocess.run(["scancel", "--me"], env=env, capture_output=True, check=False)
    steps = directory / "spool"
    _wait(lambda: not [p for p in steps.iterdir() if p.is_socket()], directory, "rid of its steps")


def _idle(variables: dict[str, str]) -> bool:
    asked = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], env={**os.environ, **variables}, capture_output=True, check=False
    )
    return asked.stdout.strip() == b"idle"


def _wait(ready: Callable[[], bool], directory: Path, what: str = "ready") -> None:
    end = time.monotonic() + READY_S
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in directory.glob("*.out"))
            raise AssertionError(f"Slurm is not {what} after {READY_S:g} s\n{logs}")
        time.sleep(0.1)
