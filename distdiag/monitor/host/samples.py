"""Sample the node, its rank processes (psutil) and its GPUs once a second, and write the rows."""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import psutil

from distdiag import cgroups, procfs
from distdiag.monitor.host import processes
from distdiag.monitor.host.gpus import Gpus, Users
from distdiag.monitor.ranks.state import Gauges, RankView
from distdiag.store.rows import HostRow, ProcessRow
from distdiag.store.writer import Writer

MOST_WORKERS = 4  # children of a rank whose memory is measured
_REST = 50  # times the CPU time that it took to measure it: the pause until it is measured again
_MOST_S = 0.2  # of a sample: then the other ranks' children must wait for the next one
SAMPLES_KEPT = 10  # one a second, over which CPU and queueing times are measured
_window = partial(deque, maxlen=SAMPLES_KEPT)


class Hosts:
    """Samples of this host. Rates need two samples; in the first they are None."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.host = socket.gethostname()
        self.cores = os.cpu_count()
        self._usable = cgroups.cpus() or self.cores or 0  # a container has fewer than its host
        self._last: dict[str, tuple[float, float]] = {}
        self._workers: dict[int, list[int]] = {}  # by rank: its oldest children, whose memory is measured
        self._children: dict[int, list[int]] = {}  # by rank: all, in the last sample
        self._rested_at: dict[int, float] = {}  # by rank: when the memory of its children may be measured again
        self._spent_s = 0.0  # on that, in this sample
        self._limits = cgroups.memory_limits()
        self.memory_bytes: int | None = None  # of the host, or the limit of the ranks' cgroup
        self.available_bytes: int | None = None  # until something is killed
        # by rank: seconds that its children ran and waited for a CPU; time of the sample; number of children
        self._loading: defaultdict[int, deque[tuple[float, float, float, int]]] = defaultdict(_window)
        # by rank: seconds that its main thread waited for a CPU; time of the sample
        self._queueing: defaultdict[int, deque[tuple[float, float]]] = defaultdict(_window)
        psutil.cpu_percent()

    def _rate(self, key: str, value: float | None) -> float | None:
        if value is None:
            return None
        now = time.monotonic()
        before = self._last.get(key)
        self._last[key] = (now, value)
        if before is None or now <= before[0]:
            return None
        return max(0.0, (value - before[1]) / (now - before[0]))

    def node_row(self, t_s: float) -> HostRow:
        self._spent_s = 0.0
        memory = psutil.virtual_memory()
        self.memory_bytes = min([memory.total, *(x.limit_bytes for x in self._limits)])
        left = [x.limit_bytes - used for x in self._limits if (used := x.used_bytes()) is not None]
        self.available_bytes = max(0, min([memory.available, *left]))
        disk = _counters(psutil.disk_io_counters)
        net = _counters(psutil.net_io_counters)
        return HostRow(
            t_s=t_s,
            node=self.node,
            host=self.host,
            cpu_pct=psutil.cpu_percent(),
            load1=os.getloadavg()[0],
            cores=self.cores,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_read_bytes_per_s=self._rate("disk_read", getattr(disk, "read_bytes", None)),
            disk_write_bytes_per_s=self._rate("disk_write", getattr(disk, "write_bytes", None)),
            net_sent_bytes_per_s=self._rate("net_sent", getattr(net, "bytes_sent", None)),
            net_recv_bytes_per_s=self._rate("net_recv", getattr(net, "bytes_recv", None)),
        )

    def process_row(self, t_s: float, rank: int, pid: int, gauges: Gauges) -> ProcessRow | None:
        """Return one sample of a rank's process and its children, and set its gauges; None if it is gone or cannot be read."""
        use = processes.usage(pid)
        if use is None:
            return None
        gauges.rss_bytes = use.rss_bytes
        # mapped files and shared memory grow with a data set, and the kernel reclaims them when it needs memory
        gauges.memory.append((t_s, use.rss_bytes - use.shared_bytes))
        self._queueing[rank].append((_ran_and_waited([pid])[1], time.monotonic()))
        gauges.queued_share = _queued_share(self._queueing[rank])
        children = procfs.children(pid)
        ends = (processes.zombie_status(child) for child in children)
        gauges.dead_child = next((end for end in ends if end is not None and any(end)), None)
        oldest = [c for c in children if c in self._children.get(rank, ())][:MOST_WORKERS]
        self._measure_workers(t_s, rank, oldest, gauges.worker_memory)
        self._children[rank] = children
        allowed = processes.allowed_cpus([pid, *children])
        gauges.cpus = allowed if len(allowed) < self._usable else ()
        gauges.launcher_cpus = len(processes.allowed_cpus(procfs.parents(pid))) if gauges.cpus else 0
        self._loading[rank].append((*_ran_and_waited(children), time.monotonic(), len(children)))
        gauges.workers_starved, gauges.workers_busy = _starved_and_busy(self._loading[rank])
        cpu = self._rate(f"cpu {pid}", use.cpu_s)
        gauges.cpu_pct = None if cpu is None else cpu * 100
        child_cpu = self._rate(
            f"children {pid}", sum(u.cpu_s for c in children if (u := processes.usage(c)) is not None)
        )
        return ProcessRow(
            t_s=t_s,
            rank=rank,
            cpu_pct=gauges.cpu_pct,
            rss_bytes=use.rss_bytes,
            threads=use.threads,
            children=len(children),
            children_cpu_pct=None if child_cpu is None else child_cpu * 100,
            read_bytes_per_s=self._rate(f"read {pid}", use.read_bytes),
            write_bytes_per_s=self._rate(f"write {pid}", use.written_bytes),
        )

    def _measure_workers(self, t_s: float, rank: int, pids: list[int], memory: deque[tuple[float, int]]) -> None:
        """Add a sample of these children's memory, unless the last one was so long that this takes too much time."""
        now = time.monotonic()
        if pids != self._workers.get(rank):
            memory.clear()
            self._workers[rank] = pids
        if now < self._rested_at.get(rank, 0.0) or self._spent_s > _MOST_S:
            return
        begun_s = time.thread_time()  # on a busy host it also waits for a CPU: that costs nothing
        sizes = [size for pid in pids if (size := processes.anonymous_bytes(pid)) is not None]
        took_s = time.thread_time() - begun_s
        self._rested_at[rank] = now + _REST * took_s
        self._spent_s += took_s
        if sizes:
            memory.append((t_s, sum(sizes)))


def _queued_share(samples: deque[tuple[float, float]]) -> float | None:
    """Return the share of the last 10 s in which a rank's main thread waited for a CPU; None if not known."""
    (queued_0, t_0), (queued_1, t_1) = samples[0], samples[-1]
    return (queued_1 - queued_0) / (t_1 - t_0) if queued_1 >= queued_0 and queued_1 > 0 and t_1 > t_0 else None


def _starved_and_busy(samples: deque[tuple[float, float, float, int]]) -> tuple[float | None, float | None]:
    """Return (starved, busy) of a rank's children (DataLoader workers) in the last 10 s; None where not known.

    starved: share of their runnable time without a CPU. busy: runnable time of all children / elapsed time.
    """
    (ran_0, waited_0, t_0, n_0), (ran_1, waited_1, t_1, n_1) = samples[0], samples[-1]
    ran, waited = ran_1 - ran_0, waited_1 - waited_0
    if ran < 0 or waited < 0 or n_0 != n_1:  # other workers than before
        samples.clear()
        return None, None
    starved = waited / (ran + waited) if ran + waited > 0.2 else None
    known = ran_1 > 0 and t_1 > t_0  # else there are none, or the kernel has no such statistics
    return starved, (ran + waited) / (t_1 - t_0) if known else None


class Sampling:
    def __init__(self, node: int, writer: Writer) -> None:
        self.hosts, self.gpus = Hosts(node), Gpus(node)
        self.writer = writer
        # use of the host's CPUs in percent of all cores: the newest 20 samples, oldest first
        self.cpu_pct: list[float] = []

    def spare_cores(self) -> float:
        """Return the largest number of free cores in the last five samples."""
        return (self.hosts.cores or 1) * (1 - min(self.cpu_pct[-5:], default=0.0) / 100)

    def sample(self, t_s: float, views: Mapping[int, RankView]) -> None:
        """Take one sample of host, processes and GPUs, and write it."""
        row = self.hosts.node_row(t_s)
        self.writer.add([row])
        if row.cpu_pct is not None:
            self.cpu_pct = [*self.cpu_pct[-19:], row.cpu_pct]
        found = []
        for q, v in views.items():
            if v.ending is not None:
                continue
            p = self.hosts.process_row(t_s, q, v.header.pid, v.gauges)
            if p is not None:
                found.append(p)
            if v.header.device_total_bytes:
                v.gauges.device_memory.append((t_s, v.header.device_bytes))
        self.writer.add(found)
        self._sample_gpus(t_s, views)

    def _sample_gpus(self, t_s: float, views: Mapping[int, RankView]) -> None:
        if self.gpus.absent is not None:
            return
        headers = {q: v.header for q, v in views.items()}
        users = Users({h.gpu: q for q, h in headers.items() if h.gpu >= 0}, {h.pid: q for q, h in headers.items()})
        self.writer.add(self.gpus.rows(t_s, users))
        if self.gpus.absent is not None:
            self.writer.event(t_s, "monitor", "info", f"GPUs are not sampled: {self.gpus.absent}")


def _counters(read: Any) -> Any:
    """Return counters of the node; None in containers without them."""
    try:
        return read(nowrap=False)  # `_rate` takes a reset counter for no traffic
    except (psutil.Error, OSError, RuntimeError, NotImplementedError):
        return None


def _ran_and_waited(pids: list[int]) -> tuple[float, float]:
    """Return the seconds that these processes' main threads ran and waited for a CPU since they began."""
    ran = waited = 0.0
    for pid in pids:
        try:
            on, queued = procfs.ran_and_waited_s(pid)
        except (OSError, ValueError):  # gone, or a kernel without it
            continue
        ran, waited = ran + on, waited + queued
    return ran, waited
