"""What the home screen reads beyond the frame: charts of the job, collectives, and what the ranks' small bars are measured against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.tui.data import comm_data, history
from distdiag.tui.data.comm_data import CommData
from distdiag.tui.data.snapshot import Request

GPU_AGE_S = 10.0  # an older sample of a GPU or a host is not shown
COLLECTIVES_EVERY_S = 2.0  # how often they are read


@dataclass(frozen=True)
class Capacity:
    """What a rank's small bars are measured against; None where not measured."""

    gpu_pct: float | None = None
    gpu_memory_total: float | None = None
    host_memory_total: float | None = None


@dataclass(frozen=True)
class RanksData:
    """What the home screen shows beyond the frame."""

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
    ranks, nodes, devices = table.numbers("rank"), table.numbers("node"), table.numbers("gpu")
    wanted = set(request.ranks)
    rows = [i for i, rank in enumerate(ranks) if rank in wanted]
    on = sorted({int(nodes[i]) for i in rows if nodes[i] == nodes[i]})
    newest = run.query(
        "SELECT (SELECT max(t_s) FROM gpu WHERE t_s <= ?1), (SELECT max(t_s) FROM host WHERE t_s <= ?1)", (until,)
    )[0]
    key = (newest, on, int(frame.t_s / GPU_AGE_S))
    if cache.get("capacity_key") != key:  # sampled less often than frames are written
        which = f"WHERE t_s > ? AND t_s <= ? AND node IN ({','.join('?' * len(on))}) GROUP BY node"
        gpu_age_s = GPU_AGE_S if len(table) <= 64 else 2.0
        gpus = run.query(
            f"SELECT max(t_s), node, gpu, utilization_pct, memory_total_bytes FROM gpu {which}, gpu",
            (until - 1.0 - gpu_age_s, until, *on),
        )
        hosts = run.query(
            f"SELECT max(t_s), node, memory_total_bytes FROM host {which}", (until - 1.0 - GPU_AGE_S, until, *on)
        )
        cache["capacity"] = {r[1:3]: r[3:] for r in gpus}, {node: total for _, node, total in hosts}
        cache["capacity_key"] = key
    of_gpu, of_host = cache["capacity"]
    out = {}
    for i in rows:
        use, total = of_gpu.get((nodes[i], devices[i]), (None, None))
        out[int(ranks[i])] = Capacity(use, total, of_host.get(nodes[i]))
    return out
