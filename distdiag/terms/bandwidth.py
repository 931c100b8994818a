"""Algorithm and bus bandwidth, as nccl-tests define them.

Source: nccl-tests, doc/PERFORMANCE.md and src/*.cu. GB = 10^9 bytes. Other tools may print 2S/t as "throughput", or
GiB/s as "GB/s".
"""

from __future__ import annotations

from collections.abc import Callable

# The share of S that must cross each rank's link, on a perfect network.
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
    """Return the algorithm bandwidth in GB/s: S / t.

    Args:
        size_bytes: S as nccl-tests count it: one rank's buffer for all_reduce, broadcast, reduce, sendrecv and
            all_to_all; the sum over ranks for all_gather, reduce_scatter, gather and scatter.
        time_s: Time of one operation on the slowest rank, seconds.
    """
    return size_bytes / time_s / 1e9


def bus_bandwidth(op: str, size_bytes: int, time_s: float, world_size: int) -> float:
    """Return the bus bandwidth in GB/s: algbw x factor. It compares with the link's peak at any number of ranks.

    Raises:
        ValueError: `world_size` is below 2 (a one-rank group moves no bytes), or `op` moves none (barrier).
    """
    if world_size < 2:
        raise ValueError("bus bandwidth needs two ranks; a group of one moves no bytes")
    if op not in FACTORS:
        raise ValueError(f"{op} has no bandwidth")
    return algorithm_bandwidth(size_bytes, time_s) * FACTORS[op](world_size)
