"""Step rows as numpy columns, and their statistics: per job, per rank, over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from distdiag.store.reader import Run
from distdiag.terms.statistics import interval_of_median
from distdiag.terms.steps import DDP_TIMES, TIMES, throughput

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COLUMNS = ("rank", "step", *TIMES, *DDP_TIMES, "t_end_s", "samples", "loss", "rss_bytes", "device_bytes")
MAX_ROWS = 400_000  # read into memory; of longer runs every k-th step
MAX_SERIES = 500  # points of a chart
ENOUGH_FOR_INTERVAL = 20
ENOUGH_FOR_P95 = 40


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one kind, ms; None where the sample is too small."""

    n: int
    p50_ms: float
    mean_ms: float
    ci95_ms: tuple[float, float] | None = None  # of the median, block bootstrap
    p95_ms: float | None = None
    max_ms: float | None = None


class SeriesPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Steps `step` to `step_end` (exclusive) of the whole job: the job's step time is that of its slowest rank."""

    step: int
    step_end: int
    t_end_s: float | None
    step_ms: float  # median
    low_ms: float
    high_ms: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class Steps:
    """Rows of table `step`, by step and rank, or of the whole job; NaN is "not measured"."""

    columns: dict[str, Floats]
    every: int  # 1: all steps were read; k: every k-th

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    @property
    def rank(self) -> Ints:
        return self.columns["rank"].astype(np.int64)

    @property
    def step(self) -> Ints:
        return self.columns["step"].astype(np.int64)

    def where(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Steps:
        return Steps({k: v[rows] for k, v in self.columns.items()}, self.every)

    def by_rank(self) -> dict[int, Steps]:
        """Return the rows of each rank, by step."""
        order = np.argsort(self.rank, kind="stable")
        ranks, starts = np.unique(self.rank[order], return_index=True)
        # without rows there is no rank, and one empty part
        return {int(r): self.where(rows) for r, rows in zip(ranks, np.split(order, starts[1:]), strict=False)}


def read_steps(run: Run, max_rows: int = MAX_ROWS) -> Steps:
    """Return the step rows of a run; every k-th step if there are more than `max_rows` rows."""
    rows = run.query("SELECT count(*) FROM step")[0][0]
    every = max(1, -(-rows // max_rows))
    # DDP times few, evenly spread steps: if only some steps are read, read those
    names = ", ".join(run.named("step", COLUMNS))
    found = run.query(f"SELECT {names} FROM step WHERE step % ? = 0 ORDER BY step, rank", (every,))
    table = np.array(found, dtype=np.float64) if found else np.empty((0, len(COLUMNS)))
    return Steps({name: table[:, i] for i, name in enumerate(COLUMNS)}, every)


def job_steps(steps: Steps) -> Steps:
    """Return one row per step of the whole job: the slowest rank's time, the last end, all ranks' samples, the mean loss.

    The newest step counts only once every rank of the one before it has finished it.
    """
    measured = steps.where(~np.isnan(steps["step_ms"]))
    step, starts, counts = np.unique(measured["step"], return_index=True, return_counts=True)
    columns = {
        "step": step,
        "step_ms": np.maximum.reduceat(measured["step_ms"], starts),
        "t_end_s": np.fmax.reduceat(measured["t_end_s"], starts),
        "samples": np.add.reduceat(measured["samples"], starts),
        "loss": _mean_at(measured["loss"], starts),
    }
    end = -1 if len(step) > 1 and counts[-1] < counts[-2] else None
    return Steps({name: values[:end] for name, values in columns.items()}, steps.every)


def _mean_at(values: Floats, starts: Any) -> Floats:
    """Return the means of the runs of `values` that begin at `starts`, ignoring NaN."""
    known = ~np.isnan(values)
    total = np.add.reduceat(np.where(known, values, 0.0), starts)
    count = np.add.reduceat(known.astype(np.float64), starts)
    return np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)


def quantiles(values_ms: Floats) -> Quantiles | None:
    """Return median, interval, percentiles and maximum of a sample; None if it is empty."""
    values_ms = measured(values_ms)
    n = len(values_ms)
    if n == 0:
        return None
    ci = interval_of_median(values_ms) if n >= ENOUGH_FOR_INTERVAL else None
    return Quantiles(
        n=n,
        p50_ms=float(np.median(values_ms)),
        mean_ms=_mean_of(values_ms),
        ci95_ms=(ci.low, ci.high) if ci else None,
        p95_ms=float(np.percentile(values_ms, 95)) if n >= ENOUGH_FOR_P95 else None,
        max_ms=float(values_ms.max()),
    )


def samples_per_s(job: Steps) -> float | None:
    """Return the throughput of these steps, as `terms.steps` defines it."""
    known = job.where(~(np.isnan(job["samples"]) | np.isnan(job["t_end_s"])))
    if len(known) < 2:
        return None
    ends = known["t_end_s"]
    return throughput(float(known["samples"][1:].sum() * job.every), float(ends[-1] - ends[0]))


def series(job: Steps, points: int = MAX_SERIES) -> tuple[SeriesPoint, ...]:
    """Return the job's step time over its steps; neighbours are merged into at most `points` points."""
    width = max(1, -(-len(job) // points))
    out = []
    for a in range(0, len(job), width):
        ms = job["step_ms"][a : a + width]
        last = min(a + width, len(job)) - 1
        out.append(
            SeriesPoint(
                step=int(job.step[a]),
                step_end=int(job.step[last]) + job.every,
                t_end_s=some(job["t_end_s"][last]),
                step_ms=float(np.median(ms)),
                low_ms=float(ms.min()),
                high_ms=float(ms.max()),
                loss=mean(job["loss"][a : a + width]),
            )
        )
    return tuple(out)


def measured(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _of_measured(function: Callable[[Floats], Any], values: Floats) -> float | None:
    """Return a statistic of the measured values; None if there are none."""
    known = measured(values)
    return float(function(known)) if len(known) else None


def _mean_of(values: Floats) -> float:
    """Return the mean; infinite where damaged values add up to more than a float holds."""
    with np.errstate(over="ignore"):
        return float(values.mean())


median, mean, largest = (partial(_of_measured, function) for function in (np.median, _mean_of, np.max))


def slowest_share(steps: Steps) -> dict[int, float]:
    """Return by rank the share of steps in which its self time was the largest, of steps that two or more ranks measured."""
    known = steps.where(~np.isnan(steps["self_ms"]))
    _, starts, counts = np.unique(known.step, return_index=True, return_counts=True)
    largest_ms = np.repeat(np.maximum.reduceat(known["self_ms"], starts), counts)
    shared = np.repeat(counts > 1, counts)
    slowest = np.flatnonzero(shared & (known["self_ms"] == largest_ms))
    _, first = np.unique(known.step[slowest], return_index=True)  # of two that are equal, the lower rank
    ranks, times = np.unique(known.rank[slowest[first]], return_counts=True)
    share = dict(zip(ranks.tolist(), (times / times.sum()).tolist(), strict=True))
    return {int(r): share.get(int(r), 0.0) for r in np.unique(known.rank[shared])}


def some(value: float) -> float | None:
    """Return None for NaN."""
    return None if value != value else float(value)
