"""Measure the offset of each rank's monotonic clock against rank 0's.

On one host all processes share the kernel's monotonic clock: the offset is 0. Between hosts it is estimated as NTP does,
from the exchange with the shortest round trip; its error is at most half of that.
"""

from __future__ import annotations

import os
import time

clock_ns = time.perf_counter_ns  # CLOCK_MONOTONIC on Linux


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
