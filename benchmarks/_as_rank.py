"""Runs a script as one rank: `python _as_rank.py HOW SCRIPT`, started by mpirun, by srun, or once for all ranks.

HOW is `mpi` (the rank is that of mpirun or srun, and the script gets torch's variables) or `spawn:N:PORT` (N children by
`torch.multiprocessing.spawn`, which set their variables themselves). With DIGESTS=DIR, each rank leaves a digest of all parameters after
each step of an optimizer in DIR.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    how, script = sys.argv[1:3]
    if how.startswith("spawn:"):
        import torch.multiprocessing

        _, n, port = how.split(":")
        torch.multiprocessing.spawn(_spawned, args=(script, n, port), nprocs=int(n))
        return
    for ours, theirs in (
        ("RANK", ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID")),
        ("WORLD_SIZE", ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")),
        ("LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")),
    ):
        found = next((os.environ[name] for name in theirs if name in os.environ), None)
        if found is not None:
            os.environ.setdefault(ours, found)
    _run(script)


def _spawned(rank: int, script: str, n: str, port: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=n, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    _run(script)


def _run(script: str) -> None:
    if "DIGESTS" in os.environ:
        _keep_digest(Path(os.environ["DIGESTS"]))
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _keep_digest(directory: Path) -> None:
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    digest, steps = hashlib.sha256(), 0

    def add(optimizer: Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        for group in optimizer.param_groups:
            for p in group["params"]:
                local = p.detach()
                local = local.to_local() if hasattr(local, "to_local") else local
                digest.update(local.contiguous().cpu().view(-1).double().numpy().tobytes())

    register_optimizer_step_post_hook(add)
    atexit.register(lambda: (directory / os.environ["RANK"]).write_text(f"{steps} {digest.hexdigest()}"))


if __name__ == "__main__":
    main()
