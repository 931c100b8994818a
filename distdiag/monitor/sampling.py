"""Sample the host, the ranks' processes and the GPUs once a second, and write the rows."""

from __future__ import annotations

from collections.abc import Mapping

from distdiag.monitor.host.gpus import Gpus, Users
from distdiag.monitor.host.samples import Hosts
from distdiag.monitor.ranks.state import RankView
from distdiag.store.writer import Writer


class Sampling:
    """Host, processes and GPUs of one node.

    Attributes:
        cpu_pct: CPU use of the host in percent of all cores: the newest 20 samples, oldest first.
    """

    def __init__(self, node: int, writer: Writer) -> None:
        self.hosts, self.gpus = Hosts(node), Gpus(node)
        self.writer = writer
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
            p = self.hosts.process_row(t_s, q, v.header.pid)
            if p is not None:
                found.append(p)
                v.gauges.cpu_pct = p.cpu_pct
                v.gauges.queued_share = self.hosts.queued_share(q)
                v.gauges.workers_starved, v.gauges.workers_busy = self.hosts.workers(q)
                if p.rss_bytes is not None:
                    v.gauges.rss_bytes = p.rss_bytes
                    v.gauges.memory.append((t_s, self.hosts.private_bytes[q]))
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
