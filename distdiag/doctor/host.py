"""Check the host without torch: cores, memory, limits, shared memory, disk, clock, environment variables."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from distdiag import cgroups
from distdiag.doctor.check import Check, failed, passed, skipped, warned
from distdiag.errors import DistdiagError
from distdiag.store import location
from distdiag.terms.metrics_targets import VARIABLE, parse_metrics
from distdiag.terms.units import size_text

GIB = 2**30
FEW_FILES = 4096  # for sockets to peers, a pipe and a semaphore per DataLoader worker, data files
SMALL_SHM_BYTES = GIB  # DataLoader workers pass batches through it; Docker's default is 64 MiB
FEW_PROCESSES = 4096
RUN_BYTES = 2 * GIB  # default bound of run.db (`--keep`)


def python() -> Check:
    return passed("python", f"{platform.python_version()} ({sys.executable})")


def cores(env: Mapping[str, str], ranks: int) -> Check:
    """Compare the cores that this process may use with the threads of `ranks` local ranks."""
    usable = len(os.sched_getaffinity(0))
    quota = cgroups.cores()
    limit = min(usable, quota) if quota else usable
    found = f"{usable} usable" + (f", cgroup quota {quota:g}" if quota and quota < usable else "")
    text = env.get("OMP_NUM_THREADS")
    if text is None:
        found += "; OMP_NUM_THREADS is not set (torchrun sets 1 per rank)"
        remedy = f"export OMP_NUM_THREADS={int(limit // ranks)} for {ranks} ranks, if they compute on CPU"
        return warned("cores", found, remedy) if limit / ranks >= 4 else passed("cores", found)
    try:
        threads = int(text.split(",")[0])
    except ValueError:
        return warned("cores", f"{found}; OMP_NUM_THREADS={text!r} is not a number", "unset OMP_NUM_THREADS")
    found += f"; OMP_NUM_THREADS={threads}"
    if threads * ranks > limit:
        found += f": {ranks} ranks want {threads * ranks} threads"
        return warned("cores", found, f"export OMP_NUM_THREADS={max(1, int(limit // ranks))}")
    return passed("cores", found)


def memory(limits: list[cgroups.MemoryLimit] | None = None) -> Check:
    vm = psutil.virtual_memory()
    available = vm.available
    found = f"{size_text(vm.total)}, {size_text(available)} available"
    for x in cgroups.memory_limits() if limits is None else limits:
        used = x.used_bytes()
        if used is not None and (left := max(0, x.limit_bytes - used)) < available:
            available = left
            found += f"; cgroup limit {size_text(x.limit_bytes)}, {size_text(left)} left"
    if available < 2 * GIB:
        remedy = "free some, or raise the container's limit: each rank with torch takes 0.3–1 GiB"
        return warned("memory", found, remedy)
    return passed("memory", found)


def shared_memory(path: Path = Path("/dev/shm")) -> Check:
    try:
        usage = shutil.disk_usage(path)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        return failed(
            "shared memory",
            f"{path}: {e.strerror}",
            "mount a tmpfs there (docker run --shm-size=8g, or --ipc=host): DataLoader workers and NCCL need it",
        )
    found = f"{path}: {size_text(usage.total)}, {size_text(usage.free)} free"
    if usage.free < SMALL_SHM_BYTES:
        return warned(
            "shared memory",
            found,
            "docker run --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium: Memory); "
            "DataLoader workers die with 'bus error' when it is full",
        )
    return passed("shared memory", found)


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        return passed("open files", f"ulimit -n {_limit(soft)}")
    how = (
        f"ulimit -n {_limit(hard)}"
        if hard == resource.RLIM_INFINITY or hard >= FEW_FILES
        else "raise it in /etc/security/limits.conf or with docker run --ulimit nofile=65536"
    )
    remedy = f"{how}: 'too many open files' with DataLoader workers"
    return warned("open files", f"ulimit -n {soft} (hard limit {_limit(hard)})", remedy)


def locked_memory(devices: Path = Path("/sys/class/infiniband")) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rdma = sorted(p.name for p in devices.iterdir()) if devices.is_dir() else []
    found = f"ulimit -l {_limit(soft, kib=True)}"
    if not rdma:
        return passed("locked memory", f"{found}; no RDMA device, so none is needed")
    devices_text = f"RDMA devices {', '.join(rdma[:4])}"
    if soft == resource.RLIM_INFINITY:
        return passed("locked memory", f"{found}; {devices_text}")
    remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1): NCCL over InfiniBand fails to register memory"
    return warned("locked memory", f"{found} with {devices_text}", remedy)


def processes(root: Path = Path("/sys/fs/cgroup")) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [soft] if soft != resource.RLIM_INFINITY else []
    with contextlib.suppress(OSError, ValueError):
        limits.append(int((root / "pids.max").read_text()))
    if limits and min(limits) < FEW_PROCESSES:
        remedy = "ulimit -u 65536 (docker run --pids-limit=-1): every rank starts dozens of threads"
        return warned("processes", f"at most {min(limits)} processes and threads", remedy)
    return passed("processes", f"at most {min(limits):,}" if limits else "no limit")


def _limit(n: int, kib: bool = False) -> str:
    if n == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{n // 1024:,} KiB" if kib else f"{n:,}"


def run_directory(root: Path) -> Check:
    """Check the directory for runs: writable, enough space, network file system."""
    existing = root.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        tempfile.TemporaryFile(dir=existing).close()
        free = shutil.disk_usage(existing).free
    except OSError as e:
        why = f"{root}: cannot be written ({e.strerror})"
        return failed("run directory", why, "set DISTDIAG_RUN_DIR, or use --run-dir")
    kind = location.filesystem_type(existing)
    found = f"{root} on {kind or 'an unknown file system'}, {size_text(free)} free"
    if free < RUN_BYTES // 10:
        return failed("run directory", found, "free some space, or record elsewhere: DISTDIAG_RUN_DIR, --run-dir")
    if free < RUN_BYTES:
        return warned("run directory", found, "a run may take 2 GiB: lower --keep, or record elsewhere with --run-dir")
    if location.is_network(kind):
        return warned(
            "run directory",
            found,
            "nothing to do: the database is kept on a local disk and copied back at the end; a local --run-dir avoids it",
        )
    return passed("run directory", found)


class _Timex(ctypes.Structure):
    """`struct timex` of adjtimex(2), 64-bit Linux; the tail is padding for later fields."""

    _fields_ = (
        ("modes", ctypes.c_uint), *((n, ctypes.c_long) for n in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((n, ctypes.c_long) for n in ("constant", "precision", "tolerance", "tv_sec", "tv_usec", "tick")),
        ("tail", ctypes.c_char * 256),
    )  # fmt: skip


_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized
_STA_UNSYNC = 0x40


def clock() -> Check:
    """Check whether the kernel's clock is synchronized (adjtimex, read-only), because times of nodes are compared."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        timex = _Timex()
        state = libc.adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return skipped("clock", "the kernel does not report whether it is synchronized")
    if state == _TIME_ERROR or timex.status & _STA_UNSYNC:
        return warned(
            "clock",
            "not synchronized",
            "matters on several nodes only: start chronyd or systemd-timesyncd, or times of nodes cannot be compared",
        )
    return passed("clock", f"synchronized, error at most {timex.maxerror / 1000:.0f} ms")


def metrics(env: Mapping[str, str]) -> Check:
    """Check that the metrics that DISTDIAG_METRICS asks for can be exported."""
    name, text = "metrics", env.get(VARIABLE, "")
    try:
        targets = parse_metrics(text)
    except DistdiagError as e:
        return warned(name, f"{VARIABLE}={text}: {e.message}", e.hint)
    found = []
    if targets.address is not None:
        host, port = targets.address
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as e:
            why = f"{host}:{port} cannot be served: {e.strerror}"
            return warned(name, why, f"another port: {VARIABLE}=0.0.0.0:9465")
        found.append(f"/metrics on {host}:{port}")
    if targets.otlp:
        where = env.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        found.append(f"OTLP/HTTP to {where or 'localhost:4318'}")
    return passed(name, ", ".join(found)) if found else skipped(name, f"off: {VARIABLE} is not set")


# Variables that change a job and are easily forgotten in a shell, with what they do.
_TRAPS = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "segfaults DDP on some builds and slows every collective; INFO is enough"),
    "CUDA_LAUNCH_BLOCKING": ("1", "makes every kernel synchronous"),
    "NCCL_P2P_DISABLE": ("1", "turns off NVLink and PCIe peer copies"),
    "NCCL_IB_DISABLE": ("1", "turns off InfiniBand and RoCE"),
    "NCCL_SHM_DISABLE": ("1", "turns off shared memory between the GPUs of a node"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "makes every wait block the host"),
    "TORCH_FR_BUFFER_SIZE": ("0", "turns the flight recorder off: a hang cannot be traced to its collective"),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": ("0", "turns the flight recorder off: a hang cannot be traced to its collective"),
}
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def variables(env: Mapping[str, str]) -> Check:
    """Check for environment variables that change a job and may have been forgotten."""
    names = [n for n, (value, _) in _TRAPS.items() if env.get(n, "").upper() == value]
    found = [f"{n}={env[n]} {_TRAPS[n][1]}" for n in names]
    left = [n for n in _OF_A_LAUNCHER if n in env]
    if left and "TORCHELASTIC_RUN_ID" not in env and "SLURM_PROCID" not in env:
        found.append(
            f"{', '.join(left)} set by hand: a script started without torchrun waits for ranks that never arrive"
        )
        names += left
    if found:
        return warned("variables", "; ".join(found), f"unset {' '.join(names)}")
    return passed("variables", "none that changes a job")
