"""Shared by the checks of `gpu_check.py`: outcomes, missing requirements, and processes that always end."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASS, FAIL, NOT_POSSIBLE = "pass", "fail", "not possible here"


@dataclass
class Outcome:
    """The result of one check."""

    word: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


class NotPossible(Exception):
    """This machine lacks something that the check needs; the text names it."""


@dataclass(frozen=True)
class Check:
    name: str
    about: str
    limit_s: float
    run: Callable[[], Outcome]


def need_gpu() -> Any:
    """Return torch if it sees a GPU; else raise NotPossible."""
    try:
        import torch
    except ImportError:
        raise NotPossible("torch is not installed") from None
    version = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 10):
        raise NotPossible(f"torch {torch.__version__} is older than 2.10")
    if not torch.cuda.is_available():
        raise NotPossible(f"torch {torch.__version__} sees no GPU")
    return torch


def need(*modules: str) -> None:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise NotPossible(f"not installed: {', '.join(missing)}")


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of the NCCL library that torch has loaded; torch's own answer is the one it was built with.

    None if torch has none, or has linked it into itself.
    """
    import ctypes

    with open("/proc/self/maps") as f:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in f if "libnccl.so" in line}
    number = ctypes.c_int()
    for path in loaded:
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10_000, number.value // 100 % 100, number.value % 100
    return None


def finished(
    command: list[str], limit_s: float, env: dict[str, str] | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of a command in its own session, which is killed at the limit with all its children."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "DISTDIAG_", "SLURM_", "OMPI_")
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = (
        {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
        | {"PYTHONPATH": os.pathsep.join(p for p in dict.fromkeys(paths) if p), "OMP_NUM_THREADS": "1"}
        | (env or {})
    )
    p = subprocess.Popen(
        command,
        env=environment,
        cwd=cwd or ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = p.communicate(timeout=limit_s)
        return p.returncode, out, err
    except subprocess.TimeoutExpired:
        _kill_tree(p.pid)
        return 124, "", f"no end within {limit_s:g} s"
    finally:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        p.communicate()


def _kill_tree(pid: int) -> None:
    """Kill a launcher and its ranks, which are in sessions of their own; one that is left would share the GPU with the next check."""
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    from distdiag import procfs

    children = procfs.children(pid, of_any_thread=True)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    for child in children:
        try:
            is_monitor = "distdiag.monitor" in procfs.read(f"/proc/{child}/cmdline")
        except OSError:  # gone meanwhile
            continue
        if not is_monitor:
            _kill_tree(child)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
