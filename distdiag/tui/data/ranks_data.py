"""What the home screen reads beyond the frame: charts of the job, collectives, and what the ranks' small bars are measured against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.store.rows import GpuRow, HostRow
from distdiag.tui.data import comm_data, history
from distdiag.tui.data.comm_data import CommData
from distdiag.tui.data.snapshot import Request

GPU_AGE_S = 10.0  # an older sample of a GPU or a host is not shown
COLLECTIVES_EVERY_S = 2.0  # how often they are read


@dataclass(frozen=True)
class Capacity:
    """What a rank's small bars are measured against; None where not measured."""

    gpu: GpuRow | None = None
    host: HostRow | None = None


@dataclass(frozen=True)
class RanksData:
    comm: CommData | None = None
    points: tuple[history.Point, ...] = ()
    capacity: dict[int, Capacity] = field(default_factory=dict)  # by rank, of the ranks on the screen


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> RanksData:
    """Read charts of the job, bars of the ranks on the screen, and collectives if they fit."""
    return RanksData(
        comm_data.read(run, request, frame, cache, COLLECTIVES_EVERY_S) if request.extra else None,
        history.read(run, frame, cache),
        _capacity(run, request, frame, cache),
    )


def _capacity(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> dict[int, Capacity]:
    """Return GPU and host of each rank on the screen, from the newest samples at that time."""
    until, table = frame.t_s + 1.0, frame.table
    newest = run.query(
        "SELECT (SELECT max(t_s) FROM gpu WHERE t_s <= ?1), (SELECT max(t_s) FROM host WHERE t_s <= ?1)", (until,)
    )[0]
    key = (newest, int(frame.t_s / GPU_AGE_S))
    if cache.get("capacity", (None,))[0] != key:  # sampled less often than frames are written
        since = until - 1.0 - GPU_AGE_S
        gpus = {(g.node, g.gpu): g for g in run.gpus(until) if g.t_s > since}
        cache["capacity"] = key, gpus, {h.node: h for h in run.hosts(until) if h.t_s > since}
    _, gpus, hosts = cache["capacity"]
    places = zip(*map(table.numbers, ("rank", "node", "gpu")), strict=True)
    wanted = set(request.ranks)
    return {int(r): Capacity(gpus.get((node, gpu)), hosts.get(node)) for r, node, gpu in places if r in wanted}
