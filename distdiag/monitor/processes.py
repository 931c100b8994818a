"""What the kernel says of the rank processes: alive, stopped, waiting, how they ended. No rank takes part in it."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class ThreadLook:
    """The main thread of a rank at one look."""

    state: str  # R S D T t Z X, as in /proc
    cpu_ticks: int


@dataclass(slots=True)
class Ending:
    """How a process ended: exit code or signal, where the kernel still told us (it is no child of ours)."""

    t_mono_ns: int
    exit_code: int | None = None
    signal: int | None = None


def _read(path: str) -> str:
    """A small file of /proc, many times a second: in a quarter of the time that pathlib takes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).decode("utf-8", "replace")
    finally:
        os.close(fd)


def main_thread(pid: int) -> ThreadLook | None:
    """State and CPU of a process's main thread; None where it is gone."""
    try:
        fields = _read(f"/proc/{pid}/task/{pid}/stat").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return ThreadLook(fields[0], int(fields[11]) + int(fields[12]))


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot: with the pid, an identity."""
    try:
        return int(_read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def zombie_status(pid: int) -> tuple[int | None, int | None] | None:
    """(exit_code, signal) of a process that has ended and was not yet reaped; None where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    if fields[0] not in "ZX" or len(fields) < 50:
        return None
    status = int(fields[49])
    if status & 0x7F:
        return None, status & 0x7F
    return status >> 8, None


def children(pid: int, *, of_any_thread: bool = False) -> list[int]:
    """Children that a process's main thread has started (DataLoader workers), by the kernel's own list: no walk over all.

    With `of_any_thread` those of its other threads as well: one more file to read for each thread.
    """
    task = Path(f"/proc/{pid}/task")
    try:
        threads = list(task.iterdir()) if of_any_thread else [task / str(pid)]
        return [int(c) for t in threads for c in (t / "children").read_text().split()]
    except (OSError, ValueError):
        return []


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal, by the kernel's mask."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


class Endings:
    """Waits for the ends of the ranks and reads their exit status before their parent reaps them.

    One thread on pidfds: it wakes within microseconds of an exit, while torchrun's agent polls every 100 ms.
    """

    def __init__(self) -> None:
        self.ended: dict[int, Ending] = {}
        self._poll = select.poll()
        self._fds: dict[int, int] = {}
        self._watched: set[int] = set()
        self._looked_at: set[int] = set()  # whose end is noticed by looking, at the poll's pace
        self._lock = threading.Lock()
        self.wake = threading.Event()
        threading.Thread(target=self._run, name="endings", daemon=True).start()

    def watch(self, pid: int) -> None:
        if pid in self._watched:
            return
        self._watched.add(pid)
        try:
            fd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            self._looked_at.add(pid)  # a kernel without pidfd, or gone already
            return
        with self._lock:
            self._fds[fd] = pid
            self._poll.register(fd, select.POLLIN)

    def sure(self, pid: int) -> bool:
        """Whether the kernel will tell when this process ends, and no other can take its number unseen."""
        return pid in self._watched and pid not in self._looked_at

    def _run(self) -> None:
        while True:
            try:
                ready = self._poll.poll(200)
            except OSError:
                time.sleep(0.2)
                continue
            for pid in list(self._looked_at):
                look = main_thread(pid)
                if look is None or look.state == "Z":
                    self._looked_at.discard(pid)
                    self._end(pid)
            for fd, _ in ready:
                pid = self._fds.get(fd)
                if pid is None:
                    continue
                self._end(pid)
                with self._lock:
                    self._poll.unregister(fd)
                    del self._fds[fd]
                os.close(fd)

    def _end(self, pid: int) -> None:
        status = zombie_status(pid)
        end = Ending(time.monotonic_ns())
        if status is not None:
            end.exit_code, end.signal = status
        self.ended[pid] = end
        self.wake.set()


def file_lock_waits() -> dict[int, set[int]]:
    """waiter pid -> holder pids, of file locks (flock, fcntl) that somebody waits for, from /proc/locks."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return {}
    holders: dict[str, int] = {}
    waits: dict[int, set[int]] = {}
    for line in lines:
        parts = line.split()
        number = parts[0]
        if len(parts) > 1 and parts[1] == "->":
            if len(parts) > 5 and parts[5].isdigit() and number in holders:
                waits.setdefault(int(parts[5]), set()).add(holders[number])
        elif len(parts) > 4 and parts[4].lstrip("-").isdigit():
            holders[number] = int(parts[4])
    return waits


@dataclass(slots=True)
class CpuWatch:
    """Whether main threads sleep without using CPU, look by look."""

    last: dict[int, ThreadLook] = field(default_factory=dict)

    def idle(self, pid: int) -> tuple[bool | None, str | None]:
        """(sleeps and used no CPU since the last look, state letter); None where there is no earlier look."""
        look = main_thread(pid)
        before = self.last.get(pid)
        if look is None:
            self.last.pop(pid, None)
            return None, None
        self.last[pid] = look
        if before is None:
            return None, look.state
        return look.state in "SD" and look.cpu_ticks == before.cpu_ticks, look.state
