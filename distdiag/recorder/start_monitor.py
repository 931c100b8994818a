"""Start the monitor: one per node, by the first rank that comes, in a session of its own, not as the rank's child.

The monitor holds an exclusive lock on `monitor.lock` beside the pages for as long as it lives. So a rank that can take the lock
knows that no monitor runs, and starts one: at first, and again after the monitor was killed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import distdiag

STARTS = 6  # of one node's monitor: one that dies each time is a defect of ours, and costs the job CPU


def start_monitor(run_dir: Path, pages: Path, node: int, overflow: Path) -> bool:
    """Start this node's monitor unless one runs; True if this call started it.

    The lock goes to the new process with its file descriptor, so there is no moment at which another rank could take it.
    The process forks once more and its first half exits at once, so that the rank has no child left that its own
    `os.wait()` could meet.

    Args:
        run_dir: Of the job; every node but the first keeps a run of its own in it: one writer per database.
        pages: Of this node; holds the lock.
        node: Number of this node.
        overflow: Second directory of pages, for ranks whose page found no room in `pages`.

    Raises:
        OSError: no process could be started.
    """
    lock = os.open(pages / "monitor.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_APPEND, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if os.fstat(lock).st_size >= STARTS:
            return False
        os.write(lock, b".")  # one byte a start
        _start(run_dir / f"node_{node}" if node else run_dir, pages, node, overflow, lock)
    finally:
        os.close(lock)
    return True


def _start(run_dir: Path, pages: Path, node: int, overflow: Path, lock: int) -> None:
    package_root = str(Path(distdiag.__file__).resolve().parents[1])
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "PYTHONSTARTUP", "PYTHONINSPECT")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH", "")]))
    command = [
        sys.executable, "-P", "-m", "distdiag.monitor", str(run_dir), "--pages", str(pages), "--overflow", str(overflow),
        "--node", str(node),
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,  # the job's: findings of severity error are printed there, when they happen
        env=env,
        start_new_session=True,
        close_fds=True,
        pass_fds=(lock,),
    )
    process.wait(timeout=20)


class Watch:
    """Notices from a rank that the node's monitor is gone, and starts another; two system calls a check.

    Args:
        run_dir, pages, node, overflow: As for `start_monitor`.
    """

    def __init__(self, run_dir: Path, pages: Path, node: int, overflow: Path) -> None:
        self._of = run_dir, pages, node, overflow
        self._fd: int | None = os.open(
            pages / "monitor.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_APPEND, 0o600
        )

    def check(self) -> None:
        """Start a monitor if none runs."""
        if self._fd is None:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        start_monitor(*self._of)

    def close(self) -> None:
        """For a forked child: its copy of the descriptor must not keep the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
