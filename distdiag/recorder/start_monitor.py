"""Starts the monitor: one per node, by the first rank, in its own session, not as the rank's child.

The monitor holds an exclusive lock on `monitor.lock` next to the pages while it lives. So a rank that can take the lock knows that
no monitor runs, and starts one: at first, and again after the monitor was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from distdiag import files
from distdiag.page import directories
from distdiag.recorder.descriptors import KeptFile
from distdiag.unpatched import now_s, posix_spawn, sleep, waitpid


@dataclass(frozen=True)
class Options:
    """Options of `distdiag.run` for the monitor. They are not in the environment, which other jobs would inherit."""

    quiet: bool = False
    keep_bytes: int | None = None
    tape: bool = False
    metrics: str | None = None
    nodes_port: int | None = None


options = Options()  # for this process and its children
MAX_PATHS = 200  # of a build system's; the kernel takes arguments of up to 128 KiB
STARTS = 6  # most starts of one node's monitor: one that dies each time is a bug of ours, and costs the job CPU
STARTED_S = 20.0  # the monitor's first half ends at once
# What the job has open is not the monitor's. Python's own library comes first on the path: a package may have a module of the same name.
_PROGRAM = """\
import contextlib, json, os, sys
for fd in {int(fd) for fd in os.listdir("/proc/self/fd")} - {0, 1, 2, int(sys.argv[2])}:
    with contextlib.suppress(OSError):
        os.close(fd)
sys.path += json.loads(sys.argv[1])
lock = int(sys.argv[2])
sys.argv[:] = ["distdiag.monitor", *sys.argv[3:]]
try:
    import distdiag.monitor.__main__ as program
    program.run()
except ImportError as e:  # each further start would fail, too
    os.write(lock, b"." * STARTS)
    if "--quiet" not in sys.argv and os.environ.get("DISTDIAG_QUIET") != "1":
        missing = (e.name or "").partition(".")[0]
        hint = f"pip install {missing}" if missing else "install its packages again"
        sys.stderr.write(f"distdiag: this job is not recorded: {e}\\nhint: {hint}; the job itself continues\\n")
""".replace("STARTS", str(STARTS))
# Variables of the job's Python that the monitor needs, too. Any other may print (PYTHONVERBOSE), slow down, or name a debugger.
_PYTHON = ("PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONIOENCODING")


class NotStarted(OSError):
    """The monitor's process could not be started; the run directory is not the reason."""


def start_monitor(run_dir: Path, pages: Path, node: int, overflow: Path, quiet: bool = False) -> bool:
    """Start this node's monitor unless one runs; True if this call started it.

    The lock is passed to the new process with its file descriptor, so another rank cannot take it in between. The process
    forks once more and its first half exits at once, so that the rank has no child that its own `os.wait()` could return.

    Args:
        run_dir: Run directory of the job; every other node has its own run in it: one writer per database.
        overflow: Second page directory, for ranks whose page does not fit into `pages`.
        quiet: The monitor prints nothing, because stderr is not the job's.

    Raises:
        NotStarted: no process could be started.
        OSError: the lock cannot be used.
    """
    # not the lowest number: where the script has closed its standard streams, it is that of one of the monitor's
    lock = KeptFile(files.open_own(pages, directories.MONITOR_LOCK, os.O_RDWR | os.O_APPEND)).fd
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
    from distdiag.page.reader import is_mapped

    if files.owner_of_other(run_dir) is not None:
        return [], False
    out, started = [], False
    for node, found in directories.of_run(run_dir).items():
        pages = found[0]
        if not directories.is_marked(pages) or directories.ended_record(run_dir, node).exists():
            continue
        if not any(map(is_mapped, pages.glob("*.page"))):
            continue
        with contextlib.suppress(OSError):
            started |= start_monitor(run_dir, pages, node, directories.overflow(run_dir, node), quiet=True)
            if directories.monitor_runs(pages):
                out.append(pages)
    return out, started


def _start(run_dir: Path, pages: Path, node: int, overflow: Path, lock: int, quiet: bool) -> None:
    """Start the monitor below `subprocess` and without `site`, by which debuggers, tracers and profilers follow a process's children.

    A monitor that they traced would cost the job time, and one that waits for its children (viztracer) would wait for the monitor, which
    waits for it.

    Raises:
        NotStarted: no process could be started, or its first half did not end.
    """
    silent = quiet or options.quiet or os.environ.get("DISTDIAG_QUIET") == "1"
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and (not k.startswith("PYTHON") or k in _PYTHON)}
    command = [
        _interpreter(), "-P", "-S", "-X", "utf8", "-c", _PROGRAM, json.dumps(_import_path()), str(lock), str(run_dir), "--pages", str(pages),
        "--overflow", str(overflow), "--node", str(node), *["--for-reader"] * quiet, *["--quiet"] * silent,
        *(["--keep", str(options.keep_bytes)] if options.keep_bytes else []), *["--tape"] * options.tape,
        *(["--metrics", options.metrics] if options.metrics is not None else []),
        *(["--nodes-port", str(options.nodes_port)] if options.nodes_port else []),
    ]  # fmt: skip
    # stderr is the job's: findings of severity error are printed there, when they happen; a pipe is open until the monitor ends
    actions: list[tuple[int | str, ...]] = [
        (os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(2 + silent)
    ]
    actions.append((os.POSIX_SPAWN_DUP2, lock, lock))  # a descriptor duplicated onto itself is inherited
    try:
        # neither the script's mask nor that of our threads, which block all signals
        pid = posix_spawn(command[0], command, env, file_actions=actions, setsid=True, setsigmask=())
    except OSError as e:
        raise NotStarted(e.errno, f"no process could be started: {e.strerror}") from None
    deadline = now_s() + STARTED_S
    with contextlib.suppress(ChildProcessError):  # the script's own handler of SIGCHLD has waited for it
        while not waitpid(pid, os.WNOHANG)[0]:
            if now_s() > deadline:
                os.killpg(pid, signal.SIGKILL)  # stopped by a debugger or by the kernel
                sleep(0.1)
                waitpid(pid, os.WNOHANG)  # it may be in the kernel still
                raise NotStarted(errno.ETIMEDOUT, f"its monitor did not start within {STARTED_S:g} s")
            sleep(0.005)


def _interpreter() -> str:
    """Return the running interpreter; sys.executable may be a tool's wrapper (scalene), or the process no interpreter."""
    running = os.path.realpath("/proc/self/exe")
    return running if "python" in os.path.basename(running) or not sys.executable else sys.executable


def _import_path() -> list[str]:
    """Return where this process finds packages: distdiag's own directory first, the script's after all that are installed."""
    found = [p for p in sys.path if isinstance(p, str) and os.path.isabs(p)]
    installed = ("site-packages", "dist-packages")
    found.sort(key=lambda p: not p.endswith(installed))
    return [str(Path(__file__).resolve().parents[2]), *found[:MAX_PATHS]]


class Watch:
    """Notices in a rank that the node's monitor is gone, and starts another; a check costs a few system calls."""

    def __init__(self, run_dir: Path, pages: Path, node: int, overflow: Path) -> None:
        self._of = run_dir, pages, node, overflow
        self._lock = KeptFile(files.open_own(pages, directories.MONITOR_LOCK, os.O_RDWR | os.O_APPEND))

    def check(self) -> None:
        if not self._lock.is_ours():
            return
        try:
            fcntl.flock(self._lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        fcntl.flock(self._lock.fd, fcntl.LOCK_UN)
        start_monitor(*self._of)

    def close(self) -> None:
        """For a forked child: its copy of the descriptor must not keep the lock."""
        self._lock.close()
