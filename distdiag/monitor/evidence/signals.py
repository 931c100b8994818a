"""Send a signal to a rank or a worker of its loader: the only place of the monitor and the readers that signals a process."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from distdiag import procfs
from distdiag.monitor.host import processes


def send(pid: int, number: int, page: Path, worker: int | None = None) -> None:
    """Send a real-time signal to the rank that maps `page`, or to one of its children.

    Page and number come from files, which may be forged. So the process must belong to this user, map the page and have a handler
    for the signal, without which the signal would end it. The checks hold for the process that gets the signal: they come after its
    pidfd, if the kernel has one.

    Args:
        pid: The rank.
        worker: Its child that gets the signal: a worker of its DataLoader, which no longer maps the page.

    Raises:
        OSError: a check failed, or the process is gone.
    """
    target = pid if worker is None else worker
    send_now, close = _handle(target)
    try:
        if not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
            raise OSError(errno.EINVAL, f"signal {number} is not a real-time signal")
        if not procfs.maps(pid, page):
            raise OSError(errno.EPERM, "does not map its rank page")
        if worker is not None and worker not in procfs.children(pid, of_any_thread=True):
            raise OSError(errno.EPERM, "is no child of its rank")
        if not processes.catches(target, number):
            raise OSError(errno.ESRCH, "has no signal handler any more")
        send_now(number)
    finally:
        close()


def end(ranks: Mapping[int, tuple[int, Path]]) -> list[int]:
    """SIGKILL ranks of a job that hangs and was started to be ended then; return those that were.

    All are stopped before the first is killed: a rank whose peer dies first would raise an error that hides the hang.

    Args:
        ranks: By rank, its pid and the page that it must map; one that does not, or is gone, is left out.
    """
    held: dict[int, tuple[Callable[[int], None], Callable[[], None]]] = {}
    try:
        for rank, (pid, page) in ranks.items():
            with contextlib.suppress(OSError):
                held[rank] = send_now, _ = _handle(pid)
                if procfs.maps(pid, page):
                    send_now(signal.SIGSTOP)
                else:
                    held.pop(rank)[1]()
        return [rank for rank, (send_now, _) in held.items() if _killed(send_now)]
    finally:
        for _, close in held.values():
            close()


def _killed(send_now: Callable[[int], None]) -> bool:
    try:
        send_now(signal.SIGKILL)
    except OSError:  # gone meanwhile
        return False
    return True


def _handle(pid: int) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Return functions that signal this process and no later one with its number, and that release it."""
    try:
        fd = os.pidfd_open(pid)
    except OSError as e:
        if e.errno != errno.ENOSYS:
            raise
        return lambda number: os.kill(pid, number), lambda: None
    return lambda number: signal.pidfd_send_signal(fd, number), lambda: os.close(fd)
