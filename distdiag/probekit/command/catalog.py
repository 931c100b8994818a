"""The probes by name, without importing any of them."""

from __future__ import annotations

import difflib

from distdiag.errors import DistdiagError

PROBES: dict[str, str] = {
    "barrier": "time until all ranks have arrived and left: pure latency",
    "broadcast": "one rank's buffer to all ranks",
    "allreduce": "the sum of all ranks' buffers on every rank: what DDP does with gradients",
    "reduce": "the sum of all ranks' buffers on one rank",
    "gather": "every rank's part to one rank",
    "scatter": "one rank's parts to every rank",
    "allgather": "every rank's part on every rank: what FSDP does before forward",
    "reducescatter": "the sum, each rank keeping its part: what FSDP does in backward",
    "alltoall": "every rank a different part to every rank: what expert parallelism does",
    "sendrecv": "each rank to its right neighbour while receiving from its left: pipeline traffic",
    "pairs": "every pair of ranks in disjoint rounds: which rank or link is slow",
    "dataloader": "samples/s over workers, prefetch, pinning and transfer, and the setting to use",
    "step": "step time, speed-up and memory of every strategy, for one model and global batch",
    "gpu": "every GPU's health, matrix-multiply rate and memory bandwidth against its published peak",
}
ALL = "all"
COLLECTIVES = tuple(name for name in PROBES if name not in ("pairs", "dataloader", "step", "gpu"))

_ALIASES = {name: name for name in PROBES} | {
    "allgatherintotensor": "allgather",
    "alltoallsingle": "alltoall",
    "p2p": "sendrecv",
    "pair": "pairs",
    "loader": "dataloader",
    "gpus": "gpu",
}


def canonical(name: str) -> str:
    """Return the catalog's name for `name`: `allreduce` for `all_reduce` and `all-reduce`."""
    plain = name.lower().replace("_", "").replace("-", "")
    if plain == ALL:
        return ALL
    if plain in _ALIASES:
        return _ALIASES[plain]
    near = difflib.get_close_matches(plain, [*PROBES, ALL], n=1)
    raise DistdiagError(
        f"unknown probe '{name}'",
        f"did you mean `distdiag probe {near[0]}`?" if near else "`distdiag probe list` shows them all",
    )
