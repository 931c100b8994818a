"""Find this process's rank if a launcher has started the ranks: torchrun, srun, mpirun.

Only environment variables are read: this is fast and needs no torch.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from distdiag import procfs
from distdiag.errors import DistdiagError
from distdiag.terms.launchers import MPICH, OPEN_MPI


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This process's rank, and the address of the rendezvous."""

    launcher: str  # torchrun | srun | mpirun | distdiag
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def detect(env: Mapping[str, str] | None = None) -> RankPlace | None:
    """Return the rank that a launcher gave this process; None without a launcher.

    torchrun sets RANK and WORLD_SIZE; srun SLURM_PROCID within a job step (an sbatch script itself is no rank);
    Open MPI OMPI_COMM_WORLD_RANK; MPICH and Intel MPI PMI_RANK. srun and mpirun set no rendezvous: MASTER_ADDR and
    MASTER_PORT are used if set, else the first node of the allocation and a port computed from the job's number.

    Raises:
        DistdiagError: the environment is incomplete.
    """
    e = os.environ if env is None else env
    if "RANK" in e and "WORLD_SIZE" in e:
        rank, size = _int(e, "RANK"), _int(e, "WORLD_SIZE")
        local, local_size = _int(e, "LOCAL_RANK", rank), _int(e, "LOCAL_WORLD_SIZE", size)
        return _place(e, "torchrun", rank, size, local, local_size, None, 29500)
    if "SLURM_PROCID" in e and "SLURM_STEP_NUM_TASKS" in e:
        size = _int(e, "SLURM_STEP_NUM_TASKS")
        nodes = _int(e, "SLURM_STEP_NUM_NODES", _int(e, "SLURM_NNODES", 1))
        per_node = re.match(r"\d+", e.get("SLURM_STEP_TASKS_PER_NODE", ""))
        local_size = int(per_node[0]) if per_node else max(1, size // max(1, nodes))
        node_list = e.get("SLURM_STEP_NODELIST") or e.get("SLURM_JOB_NODELIST") or ""
        host = first_host(node_list) if nodes > 1 else "127.0.0.1"
        port = 20000 + _int(e, "SLURM_JOB_ID", 0) % 10000
        return _place(e, "srun", _int(e, "SLURM_PROCID"), size, _int(e, "SLURM_LOCALID", 0), local_size, host, port)
    for mpi, job in ((OPEN_MPI, "PMIX_NAMESPACE"), (MPICH, "PMI_JOBID")):
        if mpi.rank in e and mpi.world in e:
            rank, size = _int(e, mpi.rank), _int(e, mpi.world)
            ranks_here = _int(e, mpi.local_world, size)
            port = 20000 + zlib.crc32(e.get(job, "").encode()) % 10000
            host = "127.0.0.1" if ranks_here == size else None
            return _place(e, "mpirun", rank, size, _int(e, mpi.local, rank), ranks_here, host, port)
    return None


def process_started_s() -> float:
    """Return when this process began, on time.monotonic()'s clock; now if the kernel does not report it."""
    ticks = procfs.start_ticks("self")
    if ticks is None:
        return time.monotonic()
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def first_host(node_list: str) -> str:
    """Return the first host of Slurm's folded list: `node[03-07,9],login1` -> `node03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", node_list)
    return (match[1] + (match[2] or "") + (match[3] or "")) if match else ""


def _place(
    e: Mapping[str, str], launcher: str, rank: int, size: int, local: int, local_size: int, host: str | None, port: int
) -> RankPlace:
    addr = e.get("MASTER_ADDR") or host
    if not addr:
        raise DistdiagError(
            f"{launcher} started rank {rank} of {size}, but MASTER_ADDR is not set",
            "export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500 for all ranks",
        )
    if not 0 <= rank < size:
        raise DistdiagError(f"rank {rank} does not fit a world of {size}", f"check the variables that {launcher} sets")
    return RankPlace(launcher, rank, size, local, local_size, addr, _int(e, "MASTER_PORT", port))


def _int(e: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = e.get(key)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise DistdiagError(f"{key}={text!r} is not a number", "check how the ranks were launched") from None
