"""What the kernel reports about a process in /proc/PID, proc(5)."""

from __future__ import annotations

import os
from pathlib import Path

# positions in `stat_fields`: proc(5) counts from 1, and the first two fields are left out
STATE, PARENT, USER_TICKS, SYSTEM_TICKS, THREADS, START_TICKS, EXIT_CODE = 0, 1, 11, 12, 17, 19, 49


def read(path: str) -> str:
    """Return the first 4 KiB of a file of /proc; in a quarter of the time that pathlib takes.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).decode("utf-8", "replace")
    finally:
        os.close(fd)


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before it may contain anything.

    Raises:
        OSError: the process is gone, or there is no /proc.
    """
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def start_ticks(pid: int | str) -> int | None:
    """Return the start time of a process in clock ticks since boot, which identifies it together with the pid; None if it is gone."""
    try:
        return int(stat_fields(pid)[START_TICKS])
    except (OSError, IndexError, ValueError):
        return None


def ran_and_waited_s(pid: int) -> tuple[float, float]:
    """Return the seconds that a process's main thread has run and has waited for a CPU since it began, by /proc/PID/schedstat.

    Raises:
        OSError, ValueError: the process is gone, or the kernel has no schedstat.
    """
    ran_ns, waited_ns, _ = map(int, read(f"/proc/{pid}/schedstat").split())
    return ran_ns / 1e9, waited_ns / 1e9


def children(pid: int, *, of_any_thread: bool = False) -> list[int]:
    """Return the children of a process's main thread (DataLoader workers), from the kernel's list.

    With `of_any_thread`, also those of its other threads: one more file to read for each thread.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task") if of_any_thread else [pid]
        found = []
        for t in threads:
            with open(f"/proc/{pid}/task/{t}/children", "rb", buffering=0) as f:  # of any length
                found += map(int, f.read().split())
        return found
    except (OSError, ValueError):
        return []


def waits_for_child(pid: int, child: int) -> bool:
    """True if a thread of a process waits for a child to end, and `child` is the only one that the process has."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            at = f"/proc/{pid}/task/{thread}"
            ran = read(f"{at}/schedstat")
            if read(f"{at}/wchan") == "do_wait":
                only = children(pid, of_any_thread=True) == [child]
                return only and read(f"{at}/schedstat") == ran  # it has slept since, so it has reaped no other child
    except OSError:
        pass
    return False


def parents(pid: int) -> list[int]:
    """Return the parent of a process, in a list; empty if it is gone, or the first process of all."""
    try:
        return [parent] if (parent := int(stat_fields(pid)[PARENT])) > 1 else []
    except (OSError, IndexError, ValueError):
        return []


def maps(pid: int, page: Path) -> bool:
    """True if page and process belong to this user, only this user can write the page, and the process maps it shared."""
    try:
        found = os.stat(page, follow_symlinks=False)
        owner = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/maps", "rb") as lines:
            mapped = any(
                line.split(maxsplit=5)[4] == str(found.st_ino).encode() and line.split(maxsplit=2)[1].endswith(b"s")
                for line in lines
            )
    except (OSError, IndexError):
        return False
    return mapped and found.st_uid == owner == os.getuid() and not found.st_mode & 0o022
