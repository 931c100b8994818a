"""Algorithm and bus bandwidth, as nccl-tests define them.

Source: nccl-tests, doc/PERFORMANCE.md and src/*.cu. GB = 10^9 bytes throughout. Two traps in comparing with other
tools: some print 2S/t as "throughput", some print GiB/s as "GB/s".
"""

from __future__ import annotations

from collections.abc import Callable

# Of the time that the operation needs on a perfect network: the share of S that must cross each rank's link.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "sendrecv": lambda n: 1.0,
}


def algorithm_bandwidth(size_bytes: int, time_s: float) -> float:
    """Bytes a user sees moved per second, GB/s: S / t.

    Args:
        size_bytes: S as nccl-tests count it: one rank's buffer for all_reduce, broadcast, reduce, sendrecv and
            all_to_all; the sum over ranks for all_gather, reduce_scatter, gather and scatter.
        time_s: Time of one operation on the slowest rank, seconds.
    """
    return size_bytes / time_s / 1e9


def bus_bandwidth(op: str, size_bytes: int, time_s: float, world_size: int) -> float:
    """Bus bandwidth in GB/s, comparable to the link's peak whatever the number of ranks: algbw x factor.

    Raises:
        ValueError: `world_size` is below 2 (a one-rank group moves no bytes), or `op` moves none (barrier).
    """
    if world_size < 2:
        raise ValueError("bus bandwidth needs two ranks; a group of one moves no bytes")
    if op not in FACTORS:
        raise ValueError(f"{op} has no bandwidth")
    return algorithm_bandwidth(size_bytes, time_s) * FACTORS[op](world_size)
