"""Limits that a container, SLURM or systemd puts on this process: its cgroup's and those of the cgroups around it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 writes a number near 2^63


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound of memory: who goes beyond it is killed, however much the host has left."""

    folder: Path
    limit_bytes: int

    def used_bytes(self) -> int | None:
        """Return the memory that counts against the limit, without cached file pages; None if unreadable."""
        current = _number(self.folder, "memory.current", "memory.usage_in_bytes")
        if current is None:
            return None
        try:
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            return max(0, current - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))
        except (OSError, ValueError):
            return current


def cores(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return the smallest CPU quota of this process's cgroup and its parents, in cores; None without one."""
    found = [q for folder in _folders(root, own, "cpu") if (q := _quota(folder)) is not None]
    return min(found, default=None)


def cpus(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return how many CPUs this process's cgroup may use, whatever affinity masks say; None if that is not known."""
    for folder in _folders(root, own, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):  # version 2, version 1
            with contextlib.suppress(OSError, ValueError):
                ranges = [x.split("-") for x in (folder / name).read_text().strip().split(",")]
                return sum(int(x[-1]) - int(x[0]) + 1 for x in ranges)
    return None


def memory_limits(root: Path = ROOT, own: Path = OWN) -> list[MemoryLimit]:
    """Return every limit of this process: a job step's, the job's, the container's."""
    found = []
    for folder in _folders(root, own, "memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is not None and 0 < limit < UNLIMITED:
            found.append(MemoryLimit(folder, limit))
    return found


def memory_cgroup() -> Path | None:
    """Return the directory of this process's own memory cgroup; None if none is visible."""
    found = [folder for folder in _folders(ROOT, OWN, "memory") if oom_kills(folder) is not None]
    return max(found, key=lambda f: len(f.parts), default=None)


def oom_kills(folder: Path) -> int | None:
    """Return how many processes of a memory cgroup the kernel has killed for memory; None if it does not count."""
    for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
        with contextlib.suppress(OSError, ValueError, KeyError):
            counts = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(counts["oom_kill"])
    return None


def _folders(root: Path, own: Path, controller: str) -> list[Path]:
    """Return this process's cgroup and its parents, for both cgroup versions."""
    # in a container its own cgroup is the root it sees
    places = [(root, Path(".")), (root / controller, Path("."))]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            places.append((root, Path(path.lstrip("/"))))
        elif controller in controllers.split(","):
            places.append((root / controller, Path(path.lstrip("/"))))
    return list(dict.fromkeys(f for base, path in places for f in (base / path, *(base / p for p in path.parents))))


def _quota(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(folder, "cpu.cfs_quota_us"), _number(folder, "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _number(folder: Path, *names: str) -> int | None:
    """Return the number in the first of these files that has one."""
    for name in names:
        with contextlib.suppress(OSError, ValueError):  # absent, or `max`
            return int((folder / name).read_text())
    return None
