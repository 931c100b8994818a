"""Mem/GPU: who will run out of memory, when; are the GPUs busy, and with what?"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from distdiag.store.frames import RankRow
from distdiag.store.rows import GpuRow
from distdiag.tui.data.memory_data import MemoryData
from distdiag.tui.data.order import Cached
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.draw import severity
from distdiag.tui.draw.lines import BLANK, Line, Screenful, fitted, line, marked
from distdiag.tui.draw.table import Cell, Column, choose, header, row
from distdiag.tui.draw.text import cells, clean, counted, decimal, gib, integer, percent, rate, spark, wrap
from distdiag.tui.header import title_line
from distdiag.tui.panels import brief_panel
from distdiag.tui.screens import memory_charts
from distdiag.tui.screens.ranks_columns import host_width, short_host
from distdiag.tui.ui import Ui

SPARK_WIDTH = 12
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


def _rss(s: _Shown) -> Cell:
    process = s.data.processes.get(s.rank)
    return gib(process.rss_bytes if process and process.rss_bytes is not None else s.row.rss_bytes if s.row else None)


def _trend_cell(s: _Shown) -> Cell:
    """Return growth in MiB per 100 steps; muted below one."""
    t = s.data.trend.get(s.rank)
    if t is None:
        return "–"
    mib = t / 2**20
    return (f"{mib:+,.0f}", "warning") if mib >= 8 else ("·", "muted") if abs(mib) < 1 else f"{mib:+,.0f}"


def _full_in(s: _Shown) -> Cell:
    t, free = s.data.trend.get(s.rank), s.free_bytes
    if not t or t < 8 * 2**20 or free is None:
        return "–" if t is None else "·"
    steps = int(free / t * 100)
    return f"{steps:,}", "error" if steps < 500 else "warning" if steps < 10_000 else ""


def _cpu(s: _Shown) -> Cell:
    process = s.data.processes.get(s.rank)
    return decimal(process.cpu_pct if process else s.row.cpu_pct if s.row else None, 0)


def _throttle(s: _Shown) -> Cell:
    if s.gpu is None or s.gpu.throttle is None:
        return "–"
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


def _of_gpu(name: str):
    return lambda s: None if s.gpu is None else getattr(s.gpu, name)


def _columns(snap: Snapshot, with_gpus: bool) -> list[Column[_Shown]]:
    one_node = snap.summary.nodes <= 1
    rank = Column[_Shown]("rank", "rank", 5, "global rank", lambda s: str(s.row.rank) if s.row else "–")
    host = Column[_Shown](
        "node", "node", host_width(snap), "host", lambda s: short_host(s.row.host if s.row else snap.summary.node_of.get(s.gpu.node if s.gpu else 0, "")),
        "<", 6 if one_node else 1,
    )  # fmt: skip
    rss = Column[_Shown]("memory", "rss GiB", 7, "resident memory of the process", _rss)
    trend = Column[_Shown](
        "", "MiB/100 steps", 13, "growth of device memory (else rss), MiB per 100 steps", _trend_cell, ">", 2
    )
    full = Column[_Shown]("", "steps to full", 13, "steps until the memory is full at this growth", _full_in, ">", 3)
    cpu = Column[_Shown]("cpu", "CPU %", 6, "of one core, this process", _cpu, ">", 4)
    if not with_gpus:

        def process(s: _Shown, name: str) -> float | None:
            return getattr(s.data.processes.get(s.rank), name, None)

        return [
            rank, host, rss, trend, full, cpu,
            Column("", "threads", 7, "threads of the process", lambda s: integer(process(s, "threads")), ">", 7),
            Column("", "children", 8, "child processes: DataLoader workers", lambda s: integer(process(s, "children")), ">", 5),
            Column("", "their CPU", 9, "of one core, all children", lambda s: percent(process(s, "children_cpu_pct")), ">", 8),
            Column("", "reads", 12, "from disk", lambda s: rate(process(s, "read_bytes_per_s")), ">", 9),
            Column("", "writes", 12, "to disk", lambda s: rate(process(s, "write_bytes_per_s")), ">", 10),
            Column("", "state", 10, "severity, or what became of the process", _gpu_state, "<", 0, 8),
        ]  # fmt: skip
    g = _of_gpu
    return [
        rank, host,
        Column("", "gpu", 3, "index on its node", lambda s: integer(g("gpu")(s))),
        Column("", "util", 5, "share of time a kernel ran, NVML", lambda s: percent(g("utilization_pct")(s))),
        Column("", "last minute", SPARK_WIDTH, "utilization of the last minute", lambda s: (_spark(s), "accent"), "<", 3),
        Column("", "used", 6, "device memory in use, GiB", lambda s: gib(g("memory_used_bytes")(s))),
        Column("", "of GiB", 6, "device memory", lambda s: gib(g("memory_total_bytes")(s)), ">", 2),
        Column("", "W", 4, "power", lambda s: decimal(g("power_w")(s), 0), ">", 1),
        Column("", "limit", 5, "power limit, W", lambda s: decimal(g("power_limit_w")(s), 0), ">", 11),
        Column("", "°C", 3, "temperature", lambda s: decimal(g("temperature_c")(s), 0), ">", 1),
        Column("", "MHz", 5, "SM clock", lambda s: decimal(g("sm_clock_mhz")(s), 0), ">", 7),
        Column("", "throttle", 10, "why the clock is held back, NVML", _throttle, "<", 4, 10),
        Column("", "ecc", 4, "uncorrected memory errors", lambda s: integer(g("ecc_uncorrected")(s)), ">", 10),
        Column("", "pcie", 7, "generation x width", _pcie, ">", 9),
        Column("", "torch", 6, "peak reserved by torch's allocator, GiB", lambda s: gib(s.row.device_bytes if s.row else None), ">", 6),
        trend, full, rss, cpu,
        Column("", "state", 8, "severity, or busy without progress", _gpu_state, "<", 0, 10),
    ]  # fmt: skip


def _spark(s: _Shown) -> str:
    if s.gpu is None:
        return "–"
    values = s.data.sparks.get((s.gpu.node, s.gpu.gpu), ())
    # on the scale of 0 to 100 %: a steady 95 % must look full
    return spark((0.0, 100.0, *values), len(values) + 2)[2:][-SPARK_WIDTH:]


def _pcie(s: _Shown) -> Cell:
    g = s.gpu
    if g is None or g.pcie_generation is None:
        return "–"
    now = f"{g.pcie_generation}x{g.pcie_width}"
    worse = (g.pcie_width or 0) < (g.pcie_width_max or 0)  # the generation also falls when the link idles
    return (f"{now}/{g.pcie_width_max}", "warning") if worse else now


class MemoryPage:
    name = "memory"
    title = "mem/gpu"
    question = "who will run out, when; are the GPUs busy?"

    def __init__(self) -> None:
        self.order = Cached(time.monotonic)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        ranks, items = self.order.ranks(snap, ui), self.items(snap, ui)
        room = max(1, height - 6)
        index = ui.index("memory", items) if ui.interactive else 0
        at = items[index] if items else None  # without a cursor the first row has the charts
        return Request(
            "memory",
            ui.paused_at_s,
            at if isinstance(at, int) else None,
            tuple(ranks[max(0, index - room) : index + room]),
            gpu=(at[1], at[2]) if isinstance(at, tuple) else None,
        )

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        data = snap.panel if isinstance(snap.panel, MemoryData) else MemoryData()
        spare = [("gpu", g.node, g.gpu) for g in data.gpus if g.rank is None]
        return [*self.order.ranks(snap, ui), *spare]

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, MemoryData) else MemoryData()
        lines = [title_line(snap, ui, width, self.title, self.question)]
        lines += _hosts(data, snap, width, 2 if height < 30 else 6)
        lines += _notices(data, snap, width)
        tail = brief_panel(snap, ui, width, height)
        room = height - len(lines) - len(tail) - 2
        if height >= CHARTS_FROM and data.history is not None:
            room = max(min(room, MIN_ROWS), room - memory_charts.ROOM - 1)  # with many ranks one row of charts stays
        body, shown, cursor = self._table(snap, data, ui, width, max(1, room))
        cursor = None if cursor is None else len(lines) + cursor
        lines += body
        left = height - len(lines) - len(tail) - 1
        charts = memory_charts.chart_lines(data.history, snap, width, left, ui.ascii)
        lines += [BLANK, *charts] if charts else []
        lines = [fitted(x, width) for x in lines[: height - len(tail)]]
        lines += [BLANK] * (height - len(lines) - len(tail))
        return Screenful([*lines, *tail][:height], shown, cursor)

    def _table(
        self, snap: Snapshot, data: MemoryData, ui: Ui, width: int, room: int
    ) -> tuple[list[Line], int, int | None]:
        """Return the head and at most `room` rows, how many rows that is, and the line of the cursor."""
        items = self.items(snap, ui)
        top, index = ui.window("memory", items, room)
        chosen = choose(_columns(snap, bool(data.gpus)), width, 2)
        lines = [header(chosen, 2, ui.sort, ui.reverse)]
        cursor = None
        for nth, item in enumerate(self._rows(snap, data, items[top : top + room]), top):
            hit = f"row:{item.rank}" if item.row else ""
            lead = ((f" {item.mark.glyph}", item.mark.style, hit),)
            text = row(chosen, item, lead, bool(item.row and severity.stale(item.row)), hit)
            if nth == index:
                cursor = len(lines)
                text = marked(text, width)
            lines.append(text)
        if len(items) > room:
            lines.append(line((f"   rows {top + 1:,}–{min(len(items), top + room):,} of {len(items):,}", "muted")))
        if not items:
            why = f"no rank passes `{clean(ui.filter.text)}`" if ui.filter.text else "no rank yet"
            lines.append(line((f"   {why}", "muted")))
        return lines, room, cursor

    def _rows(self, snap: Snapshot, data: MemoryData, items: Sequence[Hashable]) -> list[_Shown]:
        if snap.frame is None:
            return []
        stuck = job_state(snap).stuck
        table, marks = snap.frame.table, snap.summary.marks
        where = {int(r): i for i, r in enumerate(table.numbers("rank"))}
        by_rank = {g.rank: g for g in data.gpus if g.rank is not None}
        by_place = {(g.node, g.gpu): g for g in data.gpus}
        out = []
        for item in items:
            if isinstance(item, tuple):
                out.append(_Shown(None, by_place[(item[1], item[2])], severity.OK, data, snap, stuck))
            elif isinstance(item, int) and item in where:
                r = table.row(where[item])
                gpu = by_rank.get(item) or (by_place.get((r.node, r.gpu)) if r.gpu is not None else None)
                out.append(_Shown(r, gpu, marks[where[item]], data, snap, stuck))
        return out


def _notices(data: MemoryData, snap: Snapshot, width: int) -> list[Line]:
    """Return why the readings of the GPUs mislead, or why there are none."""
    if not data.gpus:
        why = clean(data.why_none) or "no GPU readings in this run"
        return [line((f" {why}", "muted"))] if snap.frame is not None else []
    busy = sum((g.utilization_pct or 0.0) >= BUSY_PCT for g in data.gpus)
    if not busy or not job_state(snap).stuck:
        return []
    text = f"{busy:,} GPUs are busy, yet the job makes no progress: a kernel that spins in a collective looks like work"
    rows = wrap(text, width - 4)
    return [line((f" {severity.WARN.glyph} " if i == 0 else "   ", "warning"), t) for i, t in enumerate(rows)]


def _hosts(data: MemoryData, snap: Snapshot, width: int, at_most: int) -> list[Line]:
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
        while cells("   ".join(parts)) + cells(tail) > width and len(parts) > 1:
            parts.pop()
        out.append(fitted(line("   ".join(parts), (tail, "muted")), width))
    return out
