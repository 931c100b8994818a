"""Charts of the row under the cursor of the Mem/GPU screen: its GPU since the run began, or its process and host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from distdiag.tui.data.memory_data import History
from distdiag.tui.data.samples import Samples
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw import severity
from distdiag.tui.draw.charts import MIN_HEIGHT, Chart, Curve, grid
from distdiag.tui.draw.lines import Line, fitted, line
from distdiag.tui.draw.text import clean, decimal, percent
from distdiag.tui.screens.ranks_columns import short_host

BRIDGE_S = 12.0  # on a busy machine the monitor samples every 8 s, and old samples are thinned to one in 10 s
POWER_CAP = "power cap"  # how a card is run, not a fault
GIB, MB = 2.0**30, 1e6
ROOM = MIN_HEIGHT + 1  # lines of one row of the lowest charts, with the line above them
HELP = {
    "utilization": "share of time in which a kernel ran on the GPU, NVML; a kernel that spins in a collective counts",
    "memory": "device memory in use by all processes; the axis ends at what the GPU has",
    "power": "power of the whole card; the axis ends at its limit",
    "temperature": "temperature of the GPU",
    "SM clock": "clock of the multiprocessors; the axis ends at the highest that the card has",
    "process CPU": "CPU time of the rank's process, of one core; workers: its child processes (DataLoader workers)",
    "process memory": "resident memory of the rank's process, without its child processes",
    "disk": "what the rank's process reads from disk and writes to it, 10^6 bytes a second",
    "host CPU": "CPU time of all processes on the host, of all its cores",
    "host memory": "memory in use on the host by all processes; the axis ends at what the host has",
    "host network": "what the host receives and sends on all its networks, 10^6 bytes a second",
}


def chart_lines(history: History | None, snap: Snapshot, width: int, height: int, ascii_only: bool) -> list[Line]:
    """Return a line that names the row and what it was throttled by, and its charts; nothing if not one fits."""
    if history is None or snap.t_s is None:
        return []
    charts = _of_gpu(history, ascii_only) if history.of_gpu.times else _of_process(history, snap, ascii_only)
    times = [*history.of_gpu.times[:1], *history.of_process.times[:1], *history.of_host.times[:1]]
    if not times:
        return []
    charts = [replace(c, help=HELP[c.title]) for c in charts]
    made = grid(charts, min(times), snap.t_s, width - 1, height - 1, ascii_only)
    return [fitted(_title(history, snap), width), *made] if made else []


def _title(history: History, snap: Snapshot) -> Line:
    host = short_host(snap.summary.node_of.get(history.node if history.node is not None else -1, ""))
    gpu = history.gpu
    words = [
        f"rank {history.rank}" if history.rank is not None else "",
        f"gpu {gpu.gpu}" if gpu else "",
        f"{clean(gpu.name)}" if gpu and gpu.name else "",
    ]
    name = ", ".join(w for w in words if w) + (f" on {host}" if host else "")
    reasons = history.of_gpu["throttle"]
    known = [r for r in reasons if r is not None]
    by = sorted({word for r in known for word in r.split(", ") if word})
    if not known:
        return line(" ", (name, "bold"))
    if not by:
        return line(" ", (name, "bold"), ("   never throttled", "muted"))
    share = sum(bool(r) for r in known) / len(known)
    style = _mark_style(", ".join(by))
    return line(
        " ", (name, "bold"), ("   ▲ ", style), f"throttled by {clean(', '.join(by))} in {share:.0%} of the samples"
    )


def _mark_style(reason: str) -> str:
    return "muted" if reason == POWER_CAP else "warning"


def _of_gpu(history: History, ascii_only: bool) -> list[Chart]:
    newest = history.gpu
    made = history.of_gpu
    spans = _throttled(made)

    def chart(
        title: str,
        unit: str,
        column: str,
        show: Callable[[float | None], str],
        top: float | None,
        style: str,
        scale: float = 1.0,
    ) -> Chart:
        filled = not ascii_only and style.startswith("area-")
        floor = None if title == "temperature" else 0.0
        return Chart(title, unit, (_curve(made, column, style, filled, scale=scale),), show, floor, top, spans=spans)

    charts = [
        chart("utilization", "", "utilization_pct", percent, 100.0, "area-optimizer"),
        chart(
            "memory",
            "GiB",
            "memory_used_bytes",
            _number,
            _gib(newest.memory_total_bytes if newest else None),
            "area-forward",
            GIB,
        ),
        chart("power", "W", "power_w", _whole, newest.power_limit_w if newest else None, "accent"),
        chart("temperature", "°C", "temperature_c", _whole, None, "accent"),
        chart("SM clock", "MHz", "sm_clock_mhz", _whole, newest.sm_clock_max_mhz if newest else None, "accent"),
    ]
    return [*charts, *_of_host(history, (), ascii_only)[:1]]


def _of_process(history: History, snap: Snapshot, ascii_only: bool) -> list[Chart]:
    made = history.of_process
    marks = tuple((f.first_seen_s, severity.of_finding(f.severity).style) for f in snap.findings if f.first_seen_s)
    cpu = [_curve(made, "cpu_pct", "accent", name="rank")]
    rss = _curve(made, "rss_bytes", "area-forward", not ascii_only, scale=GIB)
    if any(made["children_cpu_pct"]):
        cpu.insert(0, _curve(made, "children_cpu_pct", "area-data", name="workers"))
    disk = (
        _curve(made, "write_bytes_per_s", "area-data", name="write", scale=MB),
        _curve(made, "read_bytes_per_s", "accent", name="read", scale=MB),
    )
    own = [
        Chart("process CPU", "", tuple(cpu), percent, marks=marks),
        Chart("process memory", "GiB", (rss,), _number, marks=marks),
        Chart("disk", "MB/s", disk, _number, marks=marks),
    ]
    return [*(own if made.times else []), *_of_host(history, marks, ascii_only)]


def _of_host(history: History, marks: Sequence[tuple[float, str]], ascii_only: bool) -> list[Chart]:
    made = history.of_host
    if not made.times:
        return []
    fill = not ascii_only
    total = _gib(history.host.memory_total_bytes if history.host else None)
    used = _curve(made, "memory_used_bytes", "area-forward", fill, scale=GIB)
    net = (
        _curve(made, "net_sent_bytes_per_s", "area-data", name="out", scale=MB),
        _curve(made, "net_recv_bytes_per_s", "accent", name="in", scale=MB),
    )
    return [
        Chart("host CPU", "", (_curve(made, "cpu_pct", "area-optimizer", fill),), percent, 0.0, 100.0, tuple(marks)),
        Chart("host memory", "GiB", (used,), _number, 0.0, total, tuple(marks)),
        Chart("host network", "MB/s", net, _number, marks=tuple(marks)),
    ]


def _throttled(made: Samples) -> tuple[tuple[float, float, str], ...]:
    """Return when the GPU was throttled: first and last sample of each time, and the style of its marks."""
    out: list[tuple[float, float, str]] = []
    before = ""
    for t_s, reason in zip(made.times, made["throttle"], strict=True):
        if reason and before and _mark_style(reason) == out[-1][2]:
            out[-1] = (out[-1][0], t_s, out[-1][2])
        elif reason:
            out.append((t_s, t_s, _mark_style(reason)))
        before = reason or ""
    return tuple(out)


def _curve(made: Samples, column: str, style: str, filled: bool = False, name: str = "", scale: float = 1.0) -> Curve:
    values = [None if v is None else v / scale for v in made[column]]
    return Curve(name, made.times, values, style, filled, bridge_s=BRIDGE_S)


def _gib(v: float | None) -> float | None:
    return None if v is None else v / GIB


def _whole(v: float | None) -> str:
    return decimal(v, 0)


def _number(v: float | None) -> str:
    """Return `2.93`, `64.0`, `1,200`: three digits or more."""
    return decimal(v, 2 if v is not None and v < 9.995 else 1 if v is not None and v < 999.5 else 0)
