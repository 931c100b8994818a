"""What the screen of one rank reads beyond its row in the frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distdiag.diagnosis.model.findings import State
from distdiag.store import stacks as store
from distdiag.store.frames import Frame, RankRow
from distdiag.store.reader import Run
from distdiag.store.rows import CollectiveRow, GpuRow, HostRow, ProcessRow, StepRow
from distdiag.tui.data import excerpt
from distdiag.tui.data.snapshot import Request

GPU_HISTORY_S = 60.0
GPU_HISTORY = {"use": "utilization_pct", "memory": "memory_used_bytes", "power": "power_w", "°C": "temperature_c"}


@dataclass(frozen=True)
class RankData:
    rank: int = -1
    steps: tuple[StepRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    stack: store.RankStack | None = None
    stack_t_s: float | None = None
    process: ProcessRow | None = None
    host: HostRow | None = None
    gpu: GpuRow | None = None
    gpu_history: tuple[tuple[str, tuple[float | None, ...]], ...] = ()  # of the last minute: name, values
    source: excerpt.Excerpt | None = None  # around its line, if it makes no progress


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> RankData | None:
    if request.rank is None:
        return None
    rank = request.rank
    at = next((i for i, r in enumerate(frame.table.numbers("rank")) if r == rank), None)
    row = frame.table.row(at) if at is not None else RankRow(rank=rank)
    span = run.step_range(request.at_s)
    steps = run.steps(max(span[0], span[1] - request.window + 1), span[1], [rank]) if span else []
    still = frame.state not in (State.RUNNING, State.DEGRADED) or row.life != "running"
    sites = [(row.file, int(row.line))] if still and row.file and row.line else []
    found = store.read(run.path)
    gpus = run.gpus(request.at_s)
    at_place = (row.node, row.gpu) if row.gpu is not None else None
    gpu = next((g for g in gpus if g.rank == rank or (g.rank is None and (g.node, g.gpu) == at_place)), None)
    history: list[tuple[str, tuple[float | None, ...]]] = []
    if gpu is not None:
        sql = f"SELECT {', '.join(GPU_HISTORY.values())} FROM gpu WHERE t_s BETWEEN ? AND ? AND node = ? AND gpu = ?"
        rows = run.query(f"{sql} ORDER BY t_s", (gpu.t_s - GPU_HISTORY_S, gpu.t_s, gpu.node, gpu.gpu))
        history = list(zip(GPU_HISTORY, zip(*rows, strict=True), strict=False))
    members = {g.name: g.ranks for g in run.groups()}
    collectives = [c for c in run.collectives(10, request.at_s, 400) if rank in members.get(c.pgroup, (rank,))]
    return RankData(
        rank=rank,
        steps=tuple(steps),
        collectives=tuple(collectives[:20]),
        stack=found.ranks.get(str(rank)) if found else None,
        stack_t_s=found.t_s if found else None,
        process=next((p for p in run.processes(request.at_s) if p.rank == rank), None),
        host=next((h for h in run.hosts(request.at_s) if h.node == row.node), None),
        gpu=gpu,
        gpu_history=tuple(history),
        source=next(iter(excerpt.cached(run, sites, cache)), None),
    )
