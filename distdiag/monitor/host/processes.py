"""Read the state of rank processes from the kernel: alive, stopped, waiting, how they ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from distdiag import procfs
from distdiag.procfs import EXIT_CODE, STATE, SYSTEM_TICKS, THREADS, USER_TICKS

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
POLL_S, PAUSE_S = 0.2, 1.0  # longest sleep of the thread on pidfds: if a process has no pidfd, and otherwise
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(slots=True)
class ThreadState:
    """State of a main thread at one poll."""

    state: str  # R S D T t Z X, as in /proc
    cpu_ticks: int


@dataclass(slots=True)
class Ending:
    """How a process ended. Exit code and signal are None if the kernel no longer reports them (it is not our child)."""

    t_mono_ns: int
    exit_code: int | None = None
    signal: int | None = None


@dataclass(slots=True)
class Usage:
    """Resource use of a process so far."""

    cpu_s: float  # all threads, user and system
    threads: int
    rss_bytes: int
    shared_bytes: int  # of rss: mapped files and memory shared with others
    read_bytes: int | None  # from and to disks; None if we may not read it
    written_bytes: int | None


def main_thread(pid: int) -> ThreadState | None:
    """Return state and CPU time of a process's main thread; None if it is gone."""
    try:
        return _thread_state(procfs.read(f"/proc/{pid}/task/{pid}/stat"))
    except (OSError, IndexError):
        return None


def _thread_state(stat: str) -> ThreadState:
    fields = stat.rsplit(")", 1)[1].split(maxsplit=13)
    return ThreadState(fields[0], int(fields[11]) + int(fields[12]))


def usage(pid: int) -> Usage | None:
    """Return CPU time, threads, memory and disk I/O of a process; None if it is gone."""
    try:
        fields = procfs.stat_fields(pid)
        _, resident, shared, *_ = procfs.read(f"/proc/{pid}/statm").split()
    except (OSError, IndexError, ValueError):
        return None
    if resident == "0":  # it has ended and waits to be reaped: its memory is gone, not small
        return None
    try:
        lines = dict(line.split(": ") for line in procfs.read(f"/proc/{pid}/io").splitlines())
        read, written = int(lines["read_bytes"]), int(lines["write_bytes"])
    except (OSError, ValueError, KeyError):
        read = written = None
    return Usage(
        (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) * _TICK_S, int(fields[THREADS]), int(resident) * _PAGE_BYTES,
        int(shared) * _PAGE_BYTES, read, written,
    )  # fmt: skip


def anonymous_bytes(pid: int) -> int | None:
    """Return a process's memory that is of no file and not shared memory; of pages shared with n processes since a fork, 1/n of each.

    A page that a worker copies because it writes to it counts from then on; in `usage` it has counted since the fork. The kernel
    walks all pages: about 30 ms for each GiB. None if the process is gone, or the kernel is older than 5.3.
    """
    try:
        rollup = procfs.read(f"/proc/{pid}/smaps_rollup")
    except OSError:
        return None
    found = re.search(r"^Pss_Anon:\s*(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) << 10 if found is not None else None


def zombie_status(pid: int) -> tuple[int | None, int | None] | None:
    """Return (exit_code, signal) of a process that has ended and was not reaped yet; None if it cannot be read."""
    try:
        fields = procfs.stat_fields(pid)
    except OSError:
        return None
    if len(fields) <= EXIT_CODE or fields[STATE] not in "ZX":
        return None
    return _by_status(int(fields[EXIT_CODE]))


def allowed_cpus(pids: list[int]) -> tuple[int, ...]:
    """Return the CPUs that any of these processes may use, by their affinity masks."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError, AttributeError):  # gone, or a system without masks
            found |= os.sched_getaffinity(pid)
    return tuple(sorted(found))


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for this signal, by the kernel's mask."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


_GET_INFO, _INFO_EXIT = 0xC040FF0B, 1 << 3  # PIDFD_GET_INFO of 64 bytes, PIDFD_INFO_EXIT; Linux 6.15


def reaped_status(fd: int) -> tuple[int | None, int | None] | None:
    """Return (exit code, signal) of a reaped process, by a pidfd opened before; None on older kernels."""
    info = bytearray(struct.pack("=Q56x", _INFO_EXIT))
    try:
        fcntl.ioctl(fd, _GET_INFO, info)
    except OSError:
        return None
    mask, status = struct.unpack("=Q52xi", info)
    if not mask & _INFO_EXIT:
        return None
    return _by_status(status)


def _by_status(status: int) -> tuple[int | None, int | None]:
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)


class Endings:
    """Waits for the ranks to end and reads their exit status before their parent reaps them.

    One thread polls pidfds: it wakes within microseconds of an exit, while torchrun's agent polls every 100 ms.
    """

    def __init__(self) -> None:
        self.ended: dict[int, Ending] = {}
        self._poll = select.epoll()
        self._fds: dict[int, int] = {}
        self._watched: set[int] = set()
        self._polled: set[int] = set()  # processes without a pidfd, which are polled
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
            self._polled.add(pid)  # no pidfd in this kernel, or already gone
            return
        with self._lock:
            self._fds[fd] = pid
            self._poll.register(fd, select.EPOLLIN)

    def sure(self, pid: int) -> bool:
        """True if the kernel will report the end of this process, so that its pid cannot be reused unnoticed."""
        return pid in self._watched and pid not in self._polled

    def _run(self) -> None:
        while True:
            try:
                ready = self._poll.poll(POLL_S if self._polled else PAUSE_S)
            except OSError:
                time.sleep(POLL_S)
                continue
            for pid in list(self._polled):
                thread = main_thread(pid)
                if thread is None or thread.state == "Z":
                    self._polled.discard(pid)
                    self._end(pid)
            for fd, _ in ready:
                pid = self._fds.get(fd)
                if pid is None:
                    continue
                self._end(pid, fd)
                with self._lock:
                    self._poll.unregister(fd)
                    del self._fds[fd]
                os.close(fd)

    def _end(self, pid: int, fd: int | None = None) -> None:
        status = zombie_status(pid) or (reaped_status(fd) if fd is not None else None)
        end = Ending(time.monotonic_ns())
        if status is not None:
            end.exit_code, end.signal = status
        self.ended[pid] = end
        self.wake.set()


def file_lock_waits() -> dict[int, set[int]]:
    """Return waiter pid -> holder pids of file locks (flock, fcntl), from /proc/locks."""
    holders: dict[str, int] = {}
    waits: dict[int, set[int]] = {}
    for parts in _locks():
        number = parts[0]
        if len(parts) > 1 and parts[1] == "->":
            if len(parts) > 5 and parts[5].isdigit() and number in holders:
                waits.setdefault(int(parts[5]), set()).add(holders[number])
        elif len(parts) > 4 and parts[4].lstrip("-").isdigit():
            holders[number] = int(parts[4])
    return waits


def open_elsewhere(database: Path) -> bool:
    """True if another process has this SQLite database open: in WAL mode it holds a lock on the -shm file."""
    try:
        at = database.with_name(f"{database.name}-shm").stat()
    except OSError:
        return False
    file, own = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}:{at.st_ino}", str(os.getpid())
    return any(len(parts) > 5 and parts[5] == file and parts[4] != own for parts in _locks())


def _locks() -> list[list[str]]:
    """Return the fields of each line of /proc/locks; empty if it cannot be read."""
    try:
        return [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return []


@dataclass(slots=True)
class CpuWatch:
    """Finds main threads that sleep and have used no CPU since the last poll.

    CPU time is cheap to read. The thread's state takes several times as long and is read only if no CPU was used.
    """

    _used_ns: dict[int, int] = field(default_factory=dict)  # CPU time at the last poll
    # by process and name, kept open: opening a file takes longer than reading it
    _fds: dict[tuple[int, str], int] = field(default_factory=dict)

    def _read(self, pid: int, name: str) -> str:
        fd = self._fds.get((pid, name))
        if fd is None:
            fd = self._fds[pid, name] = os.open(f"/proc/{pid}/task/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(fd, 4096, 0).decode("utf-8", "replace")

    def forget(self, pid: int) -> None:
        """Drop a process that has ended."""
        self._used_ns.pop(pid, None)
        for name in ("schedstat", "stat"):
            fd = self._fds.pop((pid, name), None)
            if fd is not None:
                os.close(fd)

    def _cpu_ns(self, pid: int) -> int:
        """Return the CPU time of the main thread; in clock ticks if the kernel has no schedstat (no file, or zeros)."""
        try:
            used_ns = int(self._read(pid, "schedstat").split(maxsplit=1)[0])
        except (OSError, ValueError, IndexError):
            used_ns = 0
        return used_ns or _thread_state(self._read(pid, "stat")).cpu_ticks * _TICK_NS

    def idle(self, pid: int) -> tuple[bool | None, str | None]:
        """Return (sleeps and has used no CPU since the last poll, state letter if it was read); None if not known."""
        try:
            used_ns, before_ns = self._cpu_ns(pid), self._used_ns.get(pid)
            self._used_ns[pid] = used_ns
            if before_ns is not None and used_ns - before_ns >= _TICK_NS:
                return False, None
            state = _thread_state(self._read(pid, "stat")).state
        except (OSError, IndexError):
            self.forget(pid)
            return None, None
        return None if before_ns is None else state in "SD", state
