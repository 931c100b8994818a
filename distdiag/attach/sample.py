"""Takes the stacks of processes with py-spy, several at once, each with a deadline, and measures how long each was stopped.

py-spy stops a process by ptrace while it reads, changes nothing in it, and lets it continue. It is asked for native frames only
where the Python frames leave open what a rank waits for: reading the symbols of libtorch takes seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from distdiag import procfs
from distdiag.attach.ranks import Candidate
from distdiag.errors import missing_package
from distdiag.sources.stacks.frames import Frame, Process, Stack
from distdiag.sources.stacks.read import NoStacks, from_json

DEADLINE_S, NATIVE_DEADLINE_S = 10.0, 20.0  # for one process
AT_ONCE = 16
_POLL_S = 0.001  # between two reads of a process's state
STOPPED, TRACED = "T", "t"
ENDED = "it has ended"


@dataclass(slots=True)
class Sample:
    """One process at one moment."""

    process: Process | None = None  # its stacks; None if they could not be read, with `error`
    error: str = ""
    paused_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0  # how long its main thread has waited for a CPU so far; 0 on a kernel without schedstat
    children_s: float = (
        0.0  # CPU time of its children so far and their time without one: loader workers that still work
    )
    at_s: float = field(default_factory=time.monotonic)


def py_spy() -> str:
    """Return the path of py-spy.

    Raises:
        DistdiagError: it is not installed.
    """
    installed = Path(sys.executable).parent / "py-spy"
    found = str(installed) if os.access(installed, os.X_OK) else shutil.which("py-spy")
    if found is None:
        raise missing_package("attach", "py-spy")
    return found


def take(processes: Iterable[Candidate], native: bool = False) -> dict[int, Sample]:
    todo = list(processes)
    program = py_spy()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip([p.pid for p in todo], pool.map(lambda p: _one(program, p, native), todo), strict=True))


def _one(program: str, p: Candidate, native: bool) -> Sample:
    if _ended(p):
        return Sample(error=ENDED)
    if _state(p.pid) == STOPPED:
        return Sample(error="it is stopped (SIGSTOP)")  # py-spy would let it continue
    cpu_s, queued_s = _cpu_and_queued_s(p.pid)
    children_s = sum(map(sum, map(_cpu_and_queued_s, procfs.children(p.pid, of_any_thread=True))))
    sample = Sample(cpu_s=cpu_s, queued_s=queued_s, children_s=children_s)
    command = [program, "dump", "--json", "--locals", *(["--native"] if native else []), "--pid", str(p.pid)]
    with _Watch(p.pid) as watch, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as spy:  # fmt: skip
        try:
            out, err = spy.communicate(timeout=NATIVE_DEADLINE_S if native else DEADLINE_S)
        except subprocess.TimeoutExpired:
            spy.kill()
            spy.communicate()
            _resume(p)
            out, err = b"", b"no answer in time"
    sample.paused_s = watch.paused_s
    try:
        sample.process = _absolute(from_json(out)[0], p.pid)
    except NoStacks:
        text = " ".join(err.decode("utf-8", "replace").split())[:300]
        sample.error = ENDED if _ended(p) else text or "it has no frame, as at its start or end"
    return sample


def _ended(p: Candidate) -> bool:
    return _state(p.pid) in ("", "Z", "X") or procfs.start_ticks(p.pid) != p.started


class _Watch:
    """Measures how long a process is stopped by a tracer, while it is entered."""

    def __init__(self, pid: int) -> None:
        self.paused_s = 0.0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _poll(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_POLL_S):
            stopped = _state(self._pid) in (STOPPED, TRACED)
            now = time.monotonic()
            self.paused_s += (now - before) * stopped
            before = now


def _state(pid: int) -> str:
    try:
        return procfs.stat_fields(pid)[procfs.STATE]
    except (OSError, IndexError):
        return ""


def _cpu_and_queued_s(pid: int) -> tuple[float, float]:
    try:
        cpu_s, queued_s = procfs.ran_and_waited_s(pid)
        if cpu_s:
            return cpu_s, queued_s
        fields = procfs.stat_fields(f"{pid}/task/{pid}")  # zeros: a kernel without schedstat
        return (int(fields[procfs.USER_TICKS]) + int(fields[procfs.SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK"), 0.0
    except (OSError, IndexError, ValueError):
        return 0.0, 0.0


def _resume(p: Candidate) -> None:
    """Let a process continue that py-spy stopped and was killed before it could: the kernel keeps ptrace's SIGSTOP.

    It was not stopped before (`_one`), and the pid is still its own.
    """
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        if _state(p.pid) == STOPPED and procfs.start_ticks(p.pid) == p.started:
            os.kill(p.pid, signal.SIGCONT)
            return
        time.sleep(0.02)


def _absolute(process: Process, pid: int) -> Process:
    """Return the process with absolute paths: a code object keeps the path that its program was started with."""
    try:
        folder = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return process

    def fixed(f: Frame) -> Frame:
        return f if f.file.startswith("<") else replace(f, file=os.path.normpath(os.path.join(folder, f.file)))

    def of(t: Stack) -> Stack:
        return replace(t, frames=tuple(map(fixed, t.frames)))

    return replace(process, threads=tuple(map(of, process.threads)))
