"""Writes dumps of the installed torch in known situations: `python -m tests.sources.golden.write [BACKEND…]`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.jobs import REPOSITORY, free_port, launch

HERE = Path(__file__).parent
SITUATIONS = ("healthy", "missing", "order", "size", "message", "uneven")
HAS_HOOKS = hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder")
BACKENDS = ("nccl", "nccl2", "plain") if HAS_HOOKS else ("nccl",)

Dumps = dict[str, dict[str, Any]]  # situation -> rank -> dump


def dumps(situation: str, backend: str) -> dict[str, Any]:
    """Return the dump of each rank of a real job in this situation."""
    env = {"TORCH_DIST_USE_NCCL2": "1"}
    if backend != "plain":
        env = {"STANDIN_NCCL": "legacy" if backend == "nccl" else backend}
        env["PYTHONPATH"] = str(REPOSITORY / "tests" / "standins" / "stream")
    with tempfile.TemporaryDirectory() as folder:
        command = [HERE / "job.py", situation, backend, folder, str(free_port())]
        with launch(command, env=env, cwd=Path(folder), fork_ranks=True) as job:
            assert job.wait() == 0, job.stderr()[:3000]
        return {rank: _shortened(json.loads(Path(folder, rank).read_text())) for rank in ("0", "1")}


def _shortened(dump: dict[str, Any]) -> dict[str, Any]:
    for e in dump.get("entries", ()):
        e.pop("thread_id", None)
    return dump


def file_of(backend: str, version: str = torch.__version__) -> Path:
    """Return the file of a backend's dumps by a version of torch."""
    return HERE / f"torch-{version.partition('+')[0]}-{backend}.json"


if __name__ == "__main__":
    for name in sys.argv[1:] or BACKENDS:
        found: Dumps = {situation: dumps(situation, name) for situation in SITUATIONS}
        lines = (
            f'"{s}": {{\n'
            + ",\n".join(f'"{r}": {json.dumps(d, separators=(",", ":"))}' for r, d in ranks.items())
            + "\n}"
            for s, ranks in found.items()
        )
        file_of(name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(file_of(name))
