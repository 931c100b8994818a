"""Starts the monitor: one per node, by the first rank, in its own session, not as the rank's child.

The monitor holds an exclusive lock on `monitor.lock` next to the pages while it lives. So a rank that can take the lock knows that
no monitor runs, and starts one: at first, and again after the monitor was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from distdiag import files
from distdiag.page import directories
from distdiag.recorder.descriptors import KeptFile


@dataclass(frozen=True)
class Options:
    """Options of `distdiag.run` for the monitor. They are not in the environment, which other jobs would inherit."""

    quiet: bool = False
    keep_bytes: int | None = None
    tape: bool = False
    metrics: str | None = None
    nodes_port: int | None = None


options = Options()  # for this process and its children
LOCK = "monitor.lock"
STARTS = 6  # most starts of one node's monitor: one that dies each time is a bug of ours, and costs the job CPU


def start_monitor(run_dir: Path, pages: Path, node: int, overflow: Path, quiet: bool = False) -> bool:
    """Start this node's monitor unless one runs; True if this call started it.

    The lock is passed to the new process with its file descriptor, so another rank cannot take it in between. The process
    forks once more and its first half exits at once, so that the rank has no child that its own `os.wait()` could
    return.

    Args:
        run_dir: Run directory of the job; every other node has its own run in it: one writer per database.
        pages: Page directory of this node, with the lock.
        node: Number of this node.
        overflow: Second page directory, for ranks whose page does not fit into `pages`.
        quiet: The monitor prints nothing, because stderr is not the job's.

    Raises:
        OSError: no process could be started.
    """
    # not the lowest number: where the script has closed its standard streams, it is that of one of the monitor's
    lock = KeptFile(files.open_own(pages, LOCK, os.O_RDWR | os.O_APPEND)).fd
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if quiet and directories.ended_record(run_dir, node).exists():
            return False  # a monitor has closed the run meanwhile
        if os.fstat(lock).st_size >= STARTS:
            return False
        os.write(lock, b".")  # one byte a start
        _start(run_dir / f"node_{node}" if node else run_dir, pages, node, overflow, lock, quiet)
    finally:
        os.close(lock)
    return True


def take_over(run_dir: Path) -> tuple[list[Path], bool]:
    """Return the page directories of this run on this host whose monitor runs, and True if this call has started one.

    Called by readers, which change nothing of a run that somebody else made or that has ended. A monitor is started only for pages
    that a living rank of this user maps; `monitor.autopsy` judges those that were left.
    """
    if files.owner_of_other(run_dir) is not None:
        return [], False
    out, started = [], False
    for node, found in directories.of_run(run_dir).items():
        pages = found[0]
        if not directories.is_marked(pages) or directories.ended_record(run_dir, node).exists():
            continue
        if not any(map(_is_mapped, pages.glob("*.page"))):
            continue
        with contextlib.suppress(OSError):
            started |= start_monitor(run_dir, pages, node, directories.overflow(run_dir, node), quiet=True)
            if monitor_runs(pages):
                out.append(pages)
    return out, started


def _is_mapped(page: Path) -> bool:
    """True if the process that a page names lives and maps it."""
    from distdiag.page.reader import header_of, is_mapped

    header = header_of(page)
    return header is not None and is_mapped(header, page)


def monitor_runs(pages: Path) -> bool:
    """True if a monitor of these pages lives."""
    try:
        lock = files.open_to_read(pages, LOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def _start(run_dir: Path, pages: Path, node: int, overflow: Path, lock: int, quiet: bool) -> None:
    package_root = str(Path(__file__).resolve().parents[2])
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "PYTHONSTARTUP", "PYTHONINSPECT")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH", "")]))
    command = [
        sys.executable, "-P", "-m", "distdiag.monitor", str(run_dir), "--pages", str(pages), "--overflow", str(overflow),
        "--node", str(node), *["--for-reader"] * quiet, *["--quiet"] * (quiet or options.quiet),
        *(["--keep", str(options.keep_bytes)] if options.keep_bytes else []), *["--tape"] * options.tape,
        *(["--metrics", options.metrics] if options.metrics is not None else []),
        *(["--nodes-port", str(options.nodes_port)] if options.nodes_port else []),
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # the job's: findings of severity error are printed there, when they happen
        stderr=subprocess.DEVNULL if quiet else None,
        env=env,
        start_new_session=True,
        close_fds=True,
        pass_fds=(lock,),
    )
    process.wait(timeout=20)


class Watch:
    """Notices in a rank that the node's monitor is gone, and starts another; a check costs a few system calls.

    Args:
        run_dir, pages, node, overflow: As for `start_monitor`.
    """

    def __init__(self, run_dir: Path, pages: Path, node: int, overflow: Path) -> None:
        self._of = run_dir, pages, node, overflow
        self._lock: KeptFile | None = KeptFile(files.open_own(pages, LOCK, os.O_RDWR | os.O_APPEND))

    def check(self) -> None:
        """Start a monitor if none runs."""
        if self._lock is None or not self._lock.is_ours():
            return
        try:
            fcntl.flock(self._lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        fcntl.flock(self._lock.fd, fcntl.LOCK_UN)
        start_monitor(*self._of)

    def close(self) -> None:
        """For a forked child: its copy of the descriptor must not keep the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
