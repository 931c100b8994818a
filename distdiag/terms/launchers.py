"""The environment variables in which launchers number ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Variables(NamedTuple):
    """Names of one launcher's variables; the number of ranks on this host is not set by all."""

    rank: str
    world: str
    local: str
    local_world: str


# deepspeed, accelerate and most operators, too
TORCHRUN = Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = Variables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
MPICH = Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # Intel MPI, too
SLURM = Variables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
# The first that is set counts: mpirun in a batch script of Slurm inherits that script's SLURM_PROCID, which is 0 for all ranks.
LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, SLURM)
RANKS = tuple(v.rank for v in LAUNCHERS)


def launched(env: Mapping[str, str]) -> bool:
    """True if a launcher has numbered the rank of a process with this environment."""
    return any(name in env for name in RANKS)


def number(variable: str) -> int | None:
    """Return the number in a variable of this process; None if it is not set, or is no number: an error of the job."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
