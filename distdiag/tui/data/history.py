"""The job over time: step time, waiting, throughput, loss and exposed communication, from the steps of a few ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.terms.steps import throughput
from distdiag.tui.data import step_window

RANKS = 8  # whose steps are read: in a synchronous job all ranks have the same step time
POINTS = 2048  # kept; of longer runs every k-th step
_COLUMNS = ("t_end_s", "step_ms", "wait_ms", "exposed_ms", "samples", "loss")


@dataclass(frozen=True)
class Point:
    step: int
    t_s: float
    step_ms: float | None
    wait_pct: float | None
    exposed_pct: float | None  # None also for steps that DDP did not time
    samples_per_s: float | None
    loss: float | None


def _point(step: int, rows: Collection[tuple[float | None, ...]], world: int) -> Point | None:
    """Return a step of the job, from those of some ranks; None if no rank has its end."""
    columns = zip(*rows, strict=True)
    ends, times, waits, exposed, samples, losses = ([v for v in column if v is not None] for column in columns)
    if not ends:
        return None
    ms = max(times, default=None)
    waiting_pct = _percent_of(sum(waits) / len(waits) if waits else None, ms)
    # waiting for a late rank is in all but that rank's
    exposed_pct = _percent_of(min(exposed, default=None), ms)
    rate = throughput(sum(samples) / len(rows) * world, (ms or 0.0) / 1e3)
    return Point(step, max(ends), ms, waiting_pct, exposed_pct, rate, sum(losses) / len(losses) if losses else None)


def _percent_of(part_ms: float | None, step_ms: float | None) -> float | None:
    return 100 * part_ms / step_ms if part_ms is not None and step_ms else None


def read(run: Run, frame: Frame, cache: dict[Any, Any]) -> tuple[Point, ...]:
    """Return steps of the job up to the frame's moment, by their end; those read before are kept."""
    span = run.step_range()
    if span is None:
        return ()
    every = 1
    while (span[1] - span[0]) // every >= POINTS:
        every *= 2
    ranks = step_window.some_ranks(frame, RANKS)[:RANKS]
    first = span[0] + -span[0] % every
    found = step_window.read(run, cache, "history", _COLUMNS, ranks, (first, span[1], every), span[1])
    before = cache.get("points", {})
    points = {
        step: before[step] if step in before and before[step][0] is rows else (rows, _point(step, rows.values(), len(frame.table)))
        for step, rows in found.items() if rows
    }  # fmt: skip
    cache["points"] = points
    known = (point for _, point in points.values() if point is not None and point.t_s <= frame.t_s)
    return tuple(sorted(known, key=attrgetter("t_s")))
