"""What the Mem/GPU screen reads: newest samples, growth of memory, and the history of the row under the cursor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.store.rows import GpuRow, HostRow, ProcessRow
from distdiag.terms.quantiles import median_low
from distdiag.tui.data import samples
from distdiag.tui.data.samples import Samples
from distdiag.tui.data.snapshot import Request

SPARK_S = 60.0
SPARKS = 64  # at most so many GPUs have one
TREND_STEPS = 400  # the trend goes back at most so far

GpuKey = tuple[int, int]  # node, index on it


@dataclass(frozen=True)
class History:
    """Samples since the run began of one rank, its GPU and its host, or of a GPU that no rank uses."""

    rank: int | None = None
    node: int | None = None
    gpu: GpuRow | None = None  # its newest sample
    host: HostRow | None = None
    of_gpu: Samples = field(default_factory=Samples)
    of_process: Samples = field(default_factory=Samples)
    of_host: Samples = field(default_factory=Samples)


@dataclass(frozen=True)
class MemoryData:
    gpus: tuple[GpuRow, ...] = ()
    hosts: tuple[HostRow, ...] = ()
    processes: dict[int, ProcessRow] = field(default_factory=dict)
    trend: dict[int, float] = field(default_factory=dict)  # rank -> bytes per 100 steps
    sparks: dict[GpuKey, tuple[float | None, ...]] = field(default_factory=dict)  # utilization of the last minute
    history: History | None = None
    why_none: str = ""  # why there are no GPUs, in the monitor's words


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> MemoryData:
    """Read the newest samples; sparklines and growth for the ranks on the screen, history for the rank under the cursor."""
    gpus = tuple(run.gpus(request.at_s))
    hosts = tuple(run.hosts(request.at_s))
    why = ""
    if not gpus:
        found = (e.text for e in reversed(run.events()) if "nvidia" in e.text.lower() or "gpu" in e.text.lower())
        why = next(found, "")
    return MemoryData(
        gpus=gpus,
        hosts=hosts,
        processes={p.rank: p for p in run.processes(request.at_s)},
        trend=_trend(run, request, frame),
        sparks=_sparks(run, gpus, request.ranks),
        history=_history(run, request, frame, gpus, hosts, cache),
        why_none=why,
    )


def _sparks(run: Run, gpus: tuple[GpuRow, ...], ranks: Iterable[int]) -> dict[GpuKey, tuple[float | None, ...]]:
    shown = set(ranks)
    keys = [(g.node, g.gpu) for g in gpus if g.rank is None or g.rank in shown][:SPARKS]
    if not keys:
        return {}
    end = max(g.t_s for g in gpus)
    found: dict[GpuKey, list[float | None]] = {k: [] for k in keys}
    marks = ",".join(["(?,?)"] * len(keys))
    for node, gpu, value in run.query(
        "SELECT node, gpu, utilization_pct FROM gpu WHERE t_s BETWEEN ? AND ?"
        f" AND (node, gpu) IN (VALUES {marks}) ORDER BY t_s",
        (end - SPARK_S, end, *(x for k in keys for x in k)),
    ):
        found[(node, gpu)].append(value)
    return {k: tuple(v) for k, v in found.items()}


def _history(
    run: Run,
    request: Request,
    frame: Frame,
    gpus: tuple[GpuRow, ...],
    hosts: tuple[HostRow, ...],
    cache: dict[Any, Any],
) -> History | None:
    node, key = (request.gpu[0], request.gpu) if request.gpu else (None, None)
    if request.rank is not None:
        ranks = frame.table.numbers("rank")
        if request.rank not in ranks:
            return None
        row = frame.table.row(ranks.index(request.rank))
        node, key = row.node, None if row.gpu is None or row.node is None else (row.node, row.gpu)
    elif request.gpu is None:
        return None
    mine = (g for g in gpus if request.rank is not None and g.rank == request.rank)
    gpu = next(mine, None) or next((g for g in gpus if (g.node, g.gpu) == key), None)

    def of(table: str, **key: int | None) -> Samples:
        return samples.read(run, cache, frame.t_s, table, **key)

    return History(
        rank=request.rank,
        node=node,
        gpu=gpu,
        host=next((h for h in hosts if h.node == node), None),
        of_gpu=of("gpu", node=gpu.node, gpu=gpu.gpu) if gpu else Samples(),
        of_process=of("process", rank=request.rank),
        of_host=of("host", node=node),
    )


def _trend(run: Run, request: Request, frame: Frame) -> dict[int, float]:
    """Return the growth per 100 steps: median of five steps now and five steps earlier, so that one spike is no trend."""
    span = run.step_range(request.at_s)
    if span is None or not request.ranks or span[1] - span[0] < 50:
        return {}
    first, last = max(span[0], span[1] - TREND_STEPS), span[1]
    device = any(v == v for v in frame.table.numbers("device_bytes"))
    column = "device_bytes" if device else "rss_bytes"
    ends: list[dict[int, list[float]]] = []
    for a, b in ((first, first + 4), (last - 4, last)):
        found: dict[int, list[float]] = {}
        for _, rank, value in run.step_values([column], a, b, request.ranks):
            if value is not None:
                found.setdefault(rank, []).append(value)
        ends.append(found)
    out = {}
    for rank in request.ranks:
        then, now = median_low(ends[0].get(rank, [])), median_low(ends[1].get(rank, []))
        if then is not None and now is not None:
            out[rank] = (now - then) / (last - first) * 100
    return out
