"""Mem/GPU: who will run out of memory, when; are the GPUs busy, and with what?"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distdiag.store.frames import RankRow
from distdiag.store.rows import GpuRow
from distdiag.tui.data import memory_data
from distdiag.tui.data.memory_data import MemoryData
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.draw import severity
from distdiag.tui.draw.lines import BLANK, Line, Screenful, fitted, labelled, line
from distdiag.tui.draw.table import Cell, Column, choose, header, row
from distdiag.tui.draw.text import (
    MISSING,
    cells,
    clean,
    counted,
    decimal,
    gib,
    integer,
    percent,
    rate,
    spark,
    within,
)
from distdiag.tui.screens import memory_charts
from distdiag.tui.screens.page import RankedPage, lead
from distdiag.tui.screens.ranks_columns import host_width, short_host
from distdiag.tui.ui import Ui

SPARK_WIDTH = 12
FAR = 100  # times the steps that were seen: what is so far ahead is not known from them
BUSY_PCT = 50.0
MIN_ROWS = 6
CHARTS_FROM = 28  # lines of a screen that has charts however many ranks there are


@dataclass(frozen=True)
class _Shown:
    """One row: a rank with the GPU it uses, a rank without one, or a GPU without a rank."""

    row: RankRow | None
    gpu: GpuRow | None
    mark: severity.Mark
    data: MemoryData
    snap: Snapshot
    stuck: bool

    @property
    def rank(self) -> int:
        return self.row.rank if self.row else -1

    @property
    def free_bytes(self) -> float | None:
        """Of the device, else of the host."""
        if self.gpu and self.gpu.memory_total_bytes is not None and self.gpu.memory_used_bytes is not None:
            return self.gpu.memory_total_bytes - self.gpu.memory_used_bytes
        node = self.row.node if self.row else None
        host = next((h for h in self.data.hosts if h.node == node), None)
        if self.gpu is None and host and host.memory_total_bytes is not None and host.memory_used_bytes is not None:
            return host.memory_total_bytes - host.memory_used_bytes
        return None

    def of_gpu(self, name: str) -> Any:
        return getattr(self.gpu, name, None)

    def of_process(self, name: str) -> Any:
        return getattr(self.data.processes.get(self.rank), name, None)


def _rss(s: _Shown) -> Cell:
    rss_bytes = s.of_process("rss_bytes")
    return gib(rss_bytes if rss_bytes is not None else s.row.rss_bytes if s.row else None)


def _trend_cell(s: _Shown) -> Cell:
    """Return growth in MiB per 100 steps; muted below one."""
    t = s.data.trend.get(s.rank)
    if t is None:
        return MISSING
    mib = t / 2**20
    return (f"{mib:+,.0f}", "warning") if mib >= 8 else ("·", "muted") if abs(mib) < 1 else f"{mib:+,.0f}"


def _full_in(s: _Shown) -> Cell:
    t, free = s.data.trend.get(s.rank), s.free_bytes
    if not t or t < 8 * 2**20 or free is None:
        return MISSING if t is None else "·"
    steps = int(free / t * 100)
    if steps > FAR * (s.snap.newest_step or 0):
        return "·"
    return f"{steps:,}", "error" if steps < 500 else "warning" if steps < 10_000 else ""


def _cpu(s: _Shown) -> Cell:
    process = s.data.processes.get(s.rank)
    return decimal(process.cpu_pct if process else s.row.cpu_pct if s.row else None, 0)


def _throttle(s: _Shown) -> Cell:
    if s.gpu is None or s.gpu.throttle is None:
        return MISSING
    if s.gpu.throttle == memory_charts.POWER_CAP:
        return s.gpu.throttle
    return (clean(s.gpu.throttle), "warning") if s.gpu.throttle else ("none", "muted")


def _gpu_state(s: _Shown) -> Cell:
    """Return the state of a GPU: `spinning` if it is busy although the job makes no progress, as in a collective."""
    busy = s.gpu is not None and (s.gpu.utilization_pct or 0.0) >= BUSY_PCT
    if busy and s.stuck:
        return "spinning", "warning"
    if s.row is None:
        return "no rank uses it", "muted"
    return severity.state_of(s.row, s.mark, s.stuck)


_C = Column[_Shown]
_RANK = _C("rank", "rank", 5, "global rank", lambda s: str(s.row.rank) if s.row else MISSING)
_RSS = _C("memory", "rss GiB", 7, "resident memory of the process", _rss)
_TREND = _C("", "MiB/100 steps", 13, "growth of device memory (else rss), MiB per 100 steps", _trend_cell, ">", 2)
_FULL = _C("", "steps to full", 13, "steps until the memory is full at this growth", _full_in, ">", 3)
_CPU = _C("cpu", "CPU %", 6, "of one core, this process", _cpu, ">", 4)
_WITHOUT_GPUS = (
    _RSS, _TREND, _FULL, _CPU,
    _C("", "threads", 7, "threads of the process", lambda s: integer(s.of_process("threads")), ">", 7),
    _C("", "children", 8, "child processes: DataLoader workers", lambda s: integer(s.of_process("children")), ">", 5),
    _C("", "their CPU", 9, "of one core, all children", lambda s: percent(s.of_process("children_cpu_pct")), ">", 8),
    _C("", "reads", 12, "from disk", lambda s: rate(s.of_process("read_bytes_per_s")), ">", 9),
    _C("", "writes", 12, "to disk", lambda s: rate(s.of_process("write_bytes_per_s")), ">", 10),
    _C("", "state", 10, "severity, or what became of the process", _gpu_state, "<", 0, 8),
)  # fmt: skip
_WITH_GPUS = (
    _C("", "gpu", 3, "index on its node", lambda s: integer(s.of_gpu("gpu"))),
    _C("", "util", 5, "share of time a kernel ran, NVML", lambda s: percent(s.of_gpu("utilization_pct"))),
    _C("", "last minute", SPARK_WIDTH, "utilization of the last minute", lambda s: (_spark(s), "accent"), "<", 3),
    _C("", "used", 6, "device memory in use, GiB", lambda s: gib(s.of_gpu("memory_used_bytes"))),
    _C("", "of GiB", 6, "device memory", lambda s: gib(s.of_gpu("memory_total_bytes")), ">", 2),
    _C("", "W", 4, "power", lambda s: decimal(s.of_gpu("power_w"), 0), ">", 1),
    _C("", "limit", 5, "power limit, W", lambda s: decimal(s.of_gpu("power_limit_w"), 0), ">", 11),
    _C("", "°C", 3, "temperature", lambda s: decimal(s.of_gpu("temperature_c"), 0), ">", 1),
    _C("", "MHz", 5, "SM clock", lambda s: decimal(s.of_gpu("sm_clock_mhz"), 0), ">", 7),
    _C("", "throttle", 10, "why the clock is held back, NVML", _throttle, "<", 4, 10),
    _C("", "ecc", 4, "uncorrected memory errors", lambda s: integer(s.of_gpu("ecc_uncorrected")), ">", 10),
    _C("", "pcie", 7, "generation x width", lambda s: _pcie(s), ">", 9),
    _C("", "torch", 6, "peak reserved by torch's allocator, GiB", lambda s: gib(s.row.device_bytes if s.row else None), ">", 6),
    _TREND, _FULL, _RSS, _CPU,
    _C("", "state", 8, "severity, or busy without progress", _gpu_state, "<", 0, 10),
)  # fmt: skip


def _columns(snap: Snapshot, with_gpus: bool) -> list[Column[_Shown]]:
    host = _C("node", "node", host_width(snap), "host", _host, "<", 6 if len(snap.summary.layout.nodes) <= 1 else 1)
    return [_RANK, host, *(_WITH_GPUS if with_gpus else _WITHOUT_GPUS)]


def _host(s: _Shown) -> Cell:
    return short_host(s.row.host if s.row else s.snap.summary.layout.hosts.get(s.gpu.node if s.gpu else 0, ""))


def _spark(s: _Shown) -> str:
    if s.gpu is None:
        return MISSING
    values = s.data.sparks.get((s.gpu.node, s.gpu.gpu), ())
    # on the scale of 0 to 100 %: a steady 95 % must look full
    return spark((0.0, 100.0, *values), len(values) + 2)[2:][-SPARK_WIDTH:]


def _pcie(s: _Shown) -> Cell:
    g = s.gpu
    if g is None or g.pcie_generation is None:
        return MISSING
    now = f"{g.pcie_generation}x{g.pcie_width}"
    worse = (g.pcie_width or 0) < (g.pcie_width_max or 0)  # the generation also falls when the link idles
    return (f"{now}/{g.pcie_width_max}", "warning") if worse else now


class MemoryPage(RankedPage[MemoryData]):
    name, title = "memory", "mem/gpu"
    question = "who will run out, when; are the GPUs busy?"
    empty = MemoryData
    read = staticmethod(memory_data.read)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        ranks, items = self.order.ranks(snap, ui), self.items(snap, ui)
        room = max(1, height - 6)
        index = ui.index("memory", items) if ui.interactive else 0
        at = items[index] if items else None  # without a cursor the first row has the charts
        return Request(
            "memory", ui.paused_at_s, at if isinstance(at, int) else None, tuple(ranks[max(0, index - room) : index + room]),
            gpu=(at[1], at[2]) if isinstance(at, tuple) else None,
        )  # fmt: skip

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        """Return the ranks, then `("gpu", node, index)` of the GPUs that no rank uses."""
        spare = [("gpu", g.node, g.gpu) for g in self.data(snap).gpus if g.rank is None]
        return [*self.order.ranks(snap, ui), *spare]

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data, items = self.data(snap), self.items(snap, ui)
        sheet = self.sheet(snap, ui, width, height)
        sheet.add(*_hosts(data, width, 2 if height < 30 else 6), *_notices(data, snap, width))
        room = sheet.left - 2
        if height >= CHARTS_FROM and data.history is not None:
            room = max(min(room, MIN_ROWS), room - memory_charts.ROOM - 1)  # with many ranks one row of charts stays
        chosen = choose(_columns(snap, bool(data.gpus)), width, 2)
        sheet.add(header(chosen, 2, ui.sort, ui.reverse))

        def rows(shown: Sequence[Hashable]) -> Iterator[Line]:
            for item in _rows(snap, data, shown):
                hit = f"row:{item.rank}" if item.row else ""
                yield row(chosen, item, lead(item.mark, hit), bool(item.row and severity.stale(item.row)), hit)

        sheet.list(ui, "memory", items, room, rows)
        if not items:
            sheet.note(f"   no rank passes `{clean(ui.filter.text)}`" if ui.filter.text else "   no rank yet")
        charts = memory_charts.chart_lines(data.history, snap, width, sheet.left - 1, ui.ascii)
        sheet.add(*([BLANK, *charts] if charts else []))
        return sheet.done()


def _rows(snap: Snapshot, data: MemoryData, items: Sequence[Hashable]) -> Iterator[_Shown]:
    if snap.frame is None:
        return
    stuck, row_of = job_state(snap).stuck, snap.summary.layout.row_of
    by_rank = {g.rank: g for g in data.gpus if g.rank is not None}
    by_place = {(g.node, g.gpu): g for g in data.gpus}
    for item in items:
        if isinstance(item, tuple):
            yield _Shown(None, by_place[(item[1], item[2])], severity.OK, data, snap, stuck)
        elif isinstance(item, int) and item in row_of:
            rank = snap.frame.table.row(row_of[item])
            gpu = by_rank.get(item) or (by_place.get((rank.node, rank.gpu)) if rank.gpu is not None else None)
            yield _Shown(rank, gpu, snap.summary.marks[row_of[item]], data, snap, stuck)


def _notices(data: MemoryData, snap: Snapshot, width: int) -> list[Line]:
    """Return why the readings of the GPUs mislead, or why there are none."""
    if not data.gpus:
        why = clean(data.why_none) or "no GPU readings in this run"
        return [line((f" {why}", "muted"))] if snap.frame is not None else []
    busy = sum((g.utilization_pct or 0.0) >= BUSY_PCT for g in data.gpus)
    if not busy or not job_state(snap).stuck:
        return []
    text = f"{busy:,} GPUs are busy, yet the job makes no progress: a kernel that spins in a collective looks like work"
    return labelled(f" {severity.WARN.glyph} ", text, width - 1, of_label="warning")


def _hosts(data: MemoryData, width: int, at_most: int) -> list[Line]:
    """Return one line per node: CPU, load, memory, disk, network; the busiest first."""
    hosts = sorted(data.hosts, key=lambda h: -(h.cpu_pct or 0.0))
    out = []
    name_width = max((cells(short_host(h.host)) for h in hosts), default=0)
    more = f"   … {counted(len(hosts) - at_most, 'more node')}" if len(hosts) > at_most else ""
    for nth, h in enumerate(hosts[:at_most], 1):
        tail = more if nth == at_most else ""
        parts = [
            f" {short_host(h.host):<{min(20, name_width)}}  CPU {percent(h.cpu_pct)} of {integer(h.cores)} cores",
            f"load {decimal(h.load1)}",
            f"memory {gib(h.memory_used_bytes)} of {gib(h.memory_total_bytes)} GiB",
            f"disk r {rate(h.disk_read_bytes_per_s)} w {rate(h.disk_write_bytes_per_s)}",
            f"net in {rate(h.net_recv_bytes_per_s)} out {rate(h.net_sent_bytes_per_s)}",
        ]
        out.append(fitted(line(within(parts, width - cells(tail)), (tail, "muted")), width))
    return out
