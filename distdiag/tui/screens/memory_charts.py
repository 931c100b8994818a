"""Charts of the row under the cursor of the Mem/GPU screen: its GPU since the run began, or its process and host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distdiag.tui.data.memory_data import History
from distdiag.tui.data.samples import Samples
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw.charts import MIN_HEIGHT, Chart, Curve, grid
from distdiag.tui.draw.lines import Line, fitted, line
from distdiag.tui.draw.text import clean, decimal, percent, three_digits
from distdiag.tui.screens.ranks_columns import short_host

BRIDGE_S = 12.0  # on a busy machine the monitor samples every 8 s, and old samples are thinned to one in 10 s
POWER_CAP = "power cap"  # how a card is run, not a fault
GIB, MB = 2.0**30, 1e6
Marks = tuple[tuple[float, str], ...]
ROOM = MIN_HEIGHT + 1  # lines of one row of the lowest charts, with the line above them


@dataclass(frozen=True)
class _Of:
    """One chart of samples."""

    title: str
    unit: str
    # of each: column, style, name; an area (`area-…`) that has no name is filled
    curves: tuple[tuple[str, str, str], ...]
    show: Callable[[float | None], str]
    help: str
    scale: float = 1.0
    floor: float | None = 0.0
    # end of the axis, by the history; None ends at the largest value
    top: Callable[[History], float | None] = lambda history: None


def _whole(v: float | None) -> str:
    return decimal(v, 0)


def _newest(of: str, name: str, scale: float = 1.0) -> Callable[[History], float | None]:
    """Return a function that reads a limit from the newest sample."""

    def top(history: History) -> float | None:
        value = getattr(getattr(history, of), name, None)
        return None if value is None else value / scale

    return top


_GPU = (
    _Of("utilization", "", (("utilization_pct", "area-optimizer", ""),), percent, top=lambda history: 100.0,
        help="share of time in which a kernel ran on the GPU, NVML; a kernel that spins in a collective counts"),
    _Of("memory", "GiB", (("memory_used_bytes", "area-forward", ""),), three_digits, scale=GIB, top=_newest("gpu", "memory_total_bytes", GIB),
        help="device memory in use by all processes; the axis ends at what the GPU has"),
    _Of("power", "W", (("power_w", "accent", ""),), _whole, top=_newest("gpu", "power_limit_w"),
        help="power of the whole card; the axis ends at its limit"),
    _Of("temperature", "°C", (("temperature_c", "accent", ""),), _whole, floor=None, help="temperature of the GPU"),
    _Of("SM clock", "MHz", (("sm_clock_mhz", "accent", ""),), _whole, top=_newest("gpu", "sm_clock_max_mhz"),
        help="clock of the multiprocessors; the axis ends at the highest that the card has"),
)  # fmt: skip
_PROCESS = (
    _Of("process CPU", "", (("children_cpu_pct", "area-data", "workers"), ("cpu_pct", "accent", "rank")), percent,
        help="CPU time of the rank's process, of one core; workers: its child processes (DataLoader workers)"),
    _Of("process memory", "GiB", (("rss_bytes", "area-forward", ""),), three_digits, scale=GIB,
        help="resident memory of the rank's process, without its child processes"),
    _Of("disk", "MB/s", (("write_bytes_per_s", "area-data", "write"), ("read_bytes_per_s", "accent", "read")), three_digits, scale=MB,
        help="what the rank's process reads from disk and writes to it, 10^6 bytes a second"),
)  # fmt: skip
_HOST = (
    _Of("host CPU", "", (("cpu_pct", "area-optimizer", ""),), percent, top=lambda history: 100.0,
        help="CPU time of all processes on the host, of all its cores"),
    _Of("host memory", "GiB", (("memory_used_bytes", "area-forward", ""),), three_digits, scale=GIB, top=_newest("host", "memory_total_bytes", GIB),
        help="memory in use on the host by all processes; the axis ends at what the host has"),
    _Of("host network", "MB/s", (("net_sent_bytes_per_s", "area-data", "out"), ("net_recv_bytes_per_s", "accent", "in")), three_digits, scale=MB,
        help="what the host receives and sends on all its networks, 10^6 bytes a second"),
)  # fmt: skip


def chart_lines(history: History | None, snap: Snapshot, width: int, height: int, ascii_only: bool) -> list[Line]:
    """Return a line that names the row and what it was throttled by, and its charts; nothing if not one fits."""
    if history is None or snap.t_s is None:
        return []
    times = [*history.of_gpu.times[:1], *history.of_process.times[:1], *history.of_host.times[:1]]
    if not times:
        return []
    if history.of_gpu.times:
        charts = [
            *_made(_GPU, history, history.of_gpu, ascii_only),
            *_made(_HOST[:1], history, history.of_host, ascii_only),
        ]
    else:
        both = ((_PROCESS, history.of_process), (_HOST, history.of_host))
        charts = [c for of, made in both for c in _made(of, history, made, ascii_only, snap.finding_marks)]
    made = grid(charts, min(times), snap.t_s, width - 1, height - 1, ascii_only)
    return [fitted(_title(history, snap), width), *made] if made else []


def _title(history: History, snap: Snapshot) -> Line:
    host = short_host(snap.summary.layout.hosts.get(history.node if history.node is not None else -1, ""))
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


def _made(
    charts: Sequence[_Of], history: History, samples: Samples, ascii_only: bool, marks: Marks = ()
) -> list[Chart]:
    """Return the charts of a series; the GPU's are marked where it was throttled."""
    spans = _throttled(samples) if samples is history.of_gpu else ()
    out = []
    for of in charts if samples.times else ():
        curves = tuple(
            Curve(
                name, samples.times, [None if v is None else v / of.scale for v in samples[column]], style,
                filled=not ascii_only and not name and style.startswith("area-"), bridge_s=BRIDGE_S,
            )
            for column, style, name in of.curves if name != "workers" or any(samples[column])
        )  # fmt: skip
        out.append(
            Chart(of.title, of.unit, curves, of.show, of.floor, of.top(history), marks=marks, spans=spans, help=of.help)
        )
    return out


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
