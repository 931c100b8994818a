"""Limits that a container, SLURM or systemd puts on this process: its cgroup's and those of the cgroups around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 writes a number near 2^63


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound of memory: who goes beyond it is killed, however much the host has left."""

    folder: Path
    limit_bytes: int

    def used_bytes(self) -> int | None:
        """What counts against it and cannot be dropped: without cached pages of files. None where it cannot be read."""
        current = _number(self.folder / "memory.current")
        if current is None:
            current = _number(self.folder / "memory.usage_in_bytes")
        if current is None:
            return None
        try:
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            return max(0, current - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))
        except (OSError, ValueError):
            return current


def cores(root: Path = ROOT) -> float | None:
    """CPU quota of this process's cgroup in cores; None where there is none, or it cannot be read."""
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return quota_us / int((root / "cpu/cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    except (OSError, ValueError):
        return None


def memory_limits(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> list[MemoryLimit]:
    """Every bound that this process is under: a job step's, the job's, the container's."""
    found: dict[Path, MemoryLimit] = {}
    for base, path in _places(root, own):
        for folder in (base / path, *(base / p for p in path.parents)):
            limit = _number(folder / "memory.max")
            limit = _number(folder / "memory.limit_in_bytes") if limit is None else limit
            if limit is not None and 0 < limit < UNLIMITED:
                found[folder] = MemoryLimit(folder, limit)
    return list(found.values())


def _places(root: Path, own: Path) -> list[tuple[Path, Path]]:
    """(where a hierarchy is mounted, this process's place in it), of both versions."""
    out = [(root, Path(".")), (root / "memory", Path("."))]  # in a container its own cgroup is the root it sees
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return out
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            out.append((root, Path(path.lstrip("/"))))
        elif "memory" in controllers.split(","):
            out.append((root / "memory", Path(path.lstrip("/"))))
    return out


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # absent, or `max`
        return None
