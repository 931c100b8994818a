"""Measure the CPU that other processes used: busy time in /proc/stat minus the use of our own processes.

On a two-core machine another process silently halves every bandwidth, so each measurement records the foreign CPU.
The kernel counts /proc/stat in ticks of 10 ms, our own use exactly; over 100 ms the error is about 0.1 CPU.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from distdiag.probekit.verdict.result import HostNoise


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU seconds used since boot on the CPUs this process may run on, and when that was read."""

    at_s: float  # time.monotonic()
    busy_s: float | None  # all processes; None if the kernel does not report it
    own_s: float  # all threads of this process, and its children if requested


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """Foreign CPU in one measuring block on one host."""

    foreign_cpus: float | None  # CPUs used by others; 0: none
    cpus: int
    ranks: int  # our ranks on this host

    @property
    def noisy(self) -> bool:
        """True if others use more than a tenth of the CPUs and leave less than one for each of our ranks."""
        if self.foreign_cpus is None:
            return False
        return self.foreign_cpus > 0.10 * self.cpus and self.cpus - self.foreign_cpus < self.ranks


def over_blocks(blocks: Sequence[BlockNoise], noisy: bool | None = None) -> HostNoise:
    """Return the foreign CPU over all blocks of a measurement.

    `noisy`: whether it disturbed the result; by default, whether it disturbed at least a quarter of the blocks.
    """
    foreign = [b.foreign_cpus for b in blocks if b.foreign_cpus is not None]
    count = sum(b.noisy for b in blocks)
    mean = sum(foreign) / len(foreign) if foreign else None
    return HostNoise(mean, blocks[0].cpus, len(blocks), count, count * 4 >= len(blocks) if noisy is None else noisy)


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def read_cpu(children: bool = False) -> CpuReading:
    """Read both counters, in 0.1 to 0.3 ms on two CPUs; `children` (a DataLoader's workers) count as our own use."""
    own_s = time.process_time()
    if children:
        used = os.times()
        own_s += used.children_user + used.children_system + _children_cpu_s()
    return CpuReading(time.monotonic(), _busy_seconds(), own_s)


def _children_cpu_s() -> float:
    used = 0.0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            times = child.cpu_times()
            used += times.user + times.system
    return used


def foreign_cpus(busy_s: float | None, own_s: float, wall_s: float) -> float | None:
    """Return the CPUs used by others: (all busy - ours) / wall, not below 0."""
    if busy_s is None or wall_s <= 0:
        return None
    return max(0.0, (busy_s - own_s) / wall_s)


def _busy_seconds() -> float | None:
    """Return the user, nice, system and steal time of our CPUs.

    Interrupt time is left out, because it contains the loopback traffic of our own ranks. Steal is the time of other
    virtual machines on our CPU.
    """
    try:
        cpus = psutil.cpu_times(percpu=True)
    except OSError:
        return None
    used = [cpus[i] for i in os.sched_getaffinity(0) if i < len(cpus)]
    return sum(t.user + t.nice + t.system + getattr(t, "steal", 0.0) for t in used)
