"""The job over time: step time, waiting, throughput, loss and exposed communication, from the steps of a few ranks."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
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


class History:
    """Steps so far, bounded: when there are too many, every second one is dropped and half as many are read."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.every = 1
        self.points: list[Point] = []
        self.times: list[float] = []

    def read(self, run: Run, world: int) -> None:
        """Add the steps since the last reading."""
        span = run.query("SELECT (SELECT min(step) FROM step), (SELECT max(step) FROM step)")[0]
        if span[0] is None:
            return
        # the newest step is read again: ranks that had not written yet may be there now
        first = self.points.pop().step if self.points else span[0]
        while (span[1] - first) / self.every + len(self.points) > POINTS:
            self.every *= 2
            self.points = [p for p in self.points if p.step % self.every == 0]
        first += -first % self.every
        rows = run.step_values(_COLUMNS, first, span[1], self.ranks, self.every)
        for step, of_step in groupby(rows, key=itemgetter(0)):
            columns = list(zip(*(row[2:] for row in of_step), strict=True))
            ends, times, waits, exposed, samples, losses = ([v for v in c if v is not None] for c in columns)
            if not ends:
                continue
            ms = max(times, default=None)
            waiting = _percent_of(sum(waits) / len(waits) if waits else None, ms)
            # waiting for a late rank is in all but that rank's
            exposed_pct = _percent_of(min(exposed, default=None), ms)
            rate = throughput(sum(samples) / len(columns[0]) * world, (ms or 0.0) / 1e3)
            loss = sum(losses) / len(losses) if losses else None
            self.points.append(Point(step, max(ends), ms, waiting, exposed_pct, rate, loss))
        self.points.sort(key=lambda p: p.t_s)
        self.times = [p.t_s for p in self.points]

    def until(self, t_s: float) -> list[Point]:
        """Steps that had ended by a moment."""
        return self.points[: bisect_right(self.times, t_s)]


def _percent_of(part_ms: float | None, step_ms: float | None) -> float | None:
    return 100 * part_ms / step_ms if part_ms is not None and step_ms else None


def read(run: Run, frame: Frame, cache: dict[Any, Any]) -> tuple[Point, ...]:
    """Steps of the job up to the frame's moment; those read before are kept in the cache."""
    ranks = tuple(step_window.some_ranks(frame, RANKS)[:RANKS])
    history = cache.get("history")
    if history is None or history.ranks != ranks:
        history = cache["history"] = History(ranks)
    newest = run.query("SELECT max(step) FROM step")[0][0]
    if newest is not None and (not history.points or newest != cache.get("history_step")):
        history.read(run, len(frame.table))
        cache["history_step"] = newest
    return tuple(history.until(frame.t_s))
