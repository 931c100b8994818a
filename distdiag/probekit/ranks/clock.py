"""Measure the offset of each rank's monotonic clock against rank 0's.

On one host all processes share the kernel's monotonic clock: the offset is 0. Between hosts it is estimated as NTP does,
from the exchange with the shortest round trip; its error is at most half of that.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

clock_ns = time.perf_counter_ns  # CLOCK_MONOTONIC on Linux
_ROUNDS = 12


class Job(Protocol):
    """What is needed here of a `job.Job`, which uses this file."""

    rank: int
    world_size: int
    control: Any

    def step(self, label: str) -> AbstractContextManager[Any]: ...


def kernel_identity(namespace: str) -> str:
    """Return a text that is equal on two processes if and only if they share a kernel and this namespace of it.

    "time": the same monotonic clock; "net": the same interfaces, with the loopback.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        return boot + os.readlink(f"/proc/self/ns/{namespace}")
    except OSError:
        return os.uname().nodename


def offset_from_exchanges(exchanges: list[tuple[int, int, int]]) -> tuple[int, int]:
    """Return (offset, error) in ns, with their clock = our clock + offset.

    Of each exchange: when it was sent, their stamp, and when it was received, in ns of the respective clocks.
    """
    sent, theirs, received = min(exchanges, key=lambda e: e[2] - e[0])
    return theirs - (sent + received) // 2, (received - sent) // 2


def align(job: Job, identities: list[str]) -> tuple[list[int], int]:
    """Return the offsets of all ranks' clocks against rank 0's in ns, and the largest error; valid on rank 0.

    Every rank calls it. It costs nothing if all identities are equal, else a few round trips per rank.
    """
    if len(set(identities)) == 1:
        return [0] * job.world_size, 0
    import torch
    import torch.distributed as dist

    stamp = torch.zeros(1, dtype=torch.int64)
    offsets, error = [0] * job.world_size, 0
    for rank in range(1, job.world_size):
        if identities[rank] == identities[0]:
            continue
        exchanges: list[tuple[int, int, int]] = []
        with job.step(f"clock alignment with rank {rank}"):
            for _ in range(_ROUNDS):
                if job.rank == 0:
                    sent = clock_ns()
                    dist.send(stamp, rank, group=job.control)
                    dist.recv(stamp, rank, group=job.control)
                    exchanges.append((sent, int(stamp[0]), clock_ns()))
                elif job.rank == rank:
                    dist.recv(stamp, 0, group=job.control)
                    stamp[0] = clock_ns()
                    dist.send(stamp, 0, group=job.control)
        if job.rank == 0:
            offsets[rank], of_this = offset_from_exchanges(exchanges)
            error = max(error, of_this)
    return offsets, error
