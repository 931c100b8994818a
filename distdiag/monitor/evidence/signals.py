"""Send a signal to a rank or a worker of its loader: the only place of the monitor and the readers that signals a process."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from distdiag import procfs
from distdiag.monitor.host import processes


def send(pid: int, number: int, page: Path, worker: int | None = None) -> None:
    """Send a real-time signal to the rank that maps `page`, or to a worker of its DataLoader, a child that no longer maps the page.

    Page and number come from files, which may be forged. So the process must belong to this user, map the page and have a handler
    for the signal, without which the signal would end it. The checks hold for the process that gets the signal: they come after its
    pidfd, if the kernel has one.

    Raises:
        OSError: a check failed, or the process is gone.
    """
    target = pid if worker is None else worker
    with _held(target) as send_now:
        if not signal.SIGRTMIN <= number <= signal.SIGRTMAX:
            raise OSError(errno.EINVAL, f"signal {number} is not a real-time signal")
        if not procfs.maps(pid, page):
            raise OSError(errno.EPERM, "does not map its rank page")
        if worker is not None and worker not in procfs.children(pid, of_any_thread=True):
            raise OSError(errno.EPERM, "is no child of its rank")
        if not processes.catches(target, number):
            raise OSError(errno.ESRCH, "has no signal handler any more")
        send_now(number)


def end(ranks: Mapping[int, tuple[int, Path]]) -> list[int]:
    """SIGKILL ranks of a job that hangs and was started to be ended then; return those that were.

    All are stopped before the first is killed: a rank whose peer dies first would raise an error that hides the hang. One that does
    not map its page, or is gone, is left out.
    """
    with contextlib.ExitStack() as stack:
        held: dict[int, Callable[[int], None]] = {}
        for rank, (pid, page) in ranks.items():
            with contextlib.suppress(OSError):
                send_now = stack.enter_context(_held(pid))
                if procfs.maps(pid, page):
                    held[rank] = send_now
                    send_now(signal.SIGSTOP)
        killed = []
        for rank, send_now in held.items():
            with contextlib.suppress(OSError):  # gone meanwhile
                send_now(signal.SIGKILL)
                killed.append(rank)
        return killed


@contextlib.contextmanager
def _held(pid: int) -> Iterator[Callable[[int], None]]:
    """Yield what signals this process and no later one with its number, if the kernel has pidfds."""
    fd = None
    try:
        fd = os.pidfd_open(pid)
    except AttributeError:  # a Python that was built on a system without them
        pass
    except OSError as e:
        if e.errno != errno.ENOSYS:
            raise
    if fd is None:
        yield lambda number: os.kill(pid, number)
        return
    try:
        yield lambda number: signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)
