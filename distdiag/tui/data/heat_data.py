"""What the heat map shows: one time of each rank in each step, or in several, and what is hot among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.store.rows import StepRow
from distdiag.terms.quantiles import median_low, quantile
from distdiag.terms.steps import STEP_PARTS
from distdiag.tui.data import step_window
from distdiag.tui.data.snapshot import Request

METRICS = {"delta": "Δ self, ms against the median rank"} | {p.column: p.metric for p in STEP_PARTS if p.metric}
SAMPLE = 64  # ranks that make the median of a step; all, up to so many
VALUES = 60_000  # read for one picture; of wider ones every k-th step


@dataclass(frozen=True)
class HeatData:
    """Values per rank and cell; None where not measured."""

    metric: str = "delta"
    first: int = 0
    last: int = -1
    values: dict[int, list[float | None]] = field(default_factory=dict)
    low: float = 0.0  # up to here a cell is quiet
    high: float = 1.0  # from here on it is at its hottest
    per: int = 1  # steps of one cell
    stride: int = 1  # every so many-th step was read
    oldest: int = 0  # the run's first step
    newest: int = 0  # the run's last step, not after the moment shown
    cell: StepRow | None = None  # the step under the cursor

    @property
    def cells(self) -> int:
        return (self.last - self.first) // self.per + 1

    def cell_of(self, step: int | None) -> int:
        """Return the cell of a step, from the left; the last one for None."""
        return max(0, min(self.cells - 1, ((self.last if step is None else step) - self.first) // self.per))


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> HeatData:
    """Read the steps of the ranks on the screen; steps read before are kept."""
    span = run.step_range(request.at_s)
    if span is None or not request.ranks:
        return HeatData(request.metric)
    per, against_others = request.per, request.metric == "delta"
    end = min(span[1], request.end if request.end is not None else span[1]) // per * per + per  # exclusive
    first, last = max(span[0] // per * per, end - request.window * per), min(end - 1, span[1])
    sample = step_window.some_ranks(frame, SAMPLE) if against_others else []
    wanted = sorted({*request.ranks, *sample})
    stride = 1
    while stride < per and (last - first) // stride * len(wanted) > VALUES:
        stride *= 2
    columns = ["self_ms" if against_others else request.metric]
    steps = step_window.read(run, cache, "heat", columns, wanted, (first, last, stride), span[1])
    values: dict[int, list[float | None]] = {rank: [] for rank in request.ranks}
    for begin in range(first, last + 1, per):
        highest: dict[int, float] = {}
        for step in range(begin, min(begin + per, last + 1), stride):
            row = {rank: value for rank, (value,) in steps.get(step, {}).items() if value is not None}
            reference = median_low([row[rank] for rank in sample if rank in row]) or 0.0
            for rank in request.ranks:
                if rank in row and (rank not in highest or row[rank] - reference > highest[rank]):
                    highest[rank] = row[rank] - reference
        for rank in request.ranks:
            values[rank].append(highest.get(rank))
    low, high = _scale(request.metric, values, frame)
    step = request.step if request.step is not None else span[1]
    cell = next(iter(run.steps(step, step, [request.rank])), None) if request.rank is not None else None
    return HeatData(request.metric, first, last, values, low, high, per, stride, *span, cell)


def _scale(metric: str, values: dict[int, list[float | None]], frame: Frame) -> tuple[float, float]:
    """Return up to which value a cell is quiet, and from which on it is at its hottest."""
    known = sorted(v for row in values.values() for v in row if v is not None and math.isfinite(v))
    if not known:
        return 0.0, 1.0
    steps = sorted(v for v in frame.table.numbers("step_ms") if v == v)
    quiet = max(1.0, 0.02 * (quantile(steps, 0.5) or 0.0))
    base = 0.0 if metric in ("delta", "late_ms") else (quantile(known, 0.25) or 0.0)
    hot = [v - base for v in known if v - base > quiet]
    # one compiled first step must not make all others look equal: at most four times the usual hot value
    top = min((quantile(known, 0.98) or 0.0) - base, 4 * (quantile(hot, 0.5) or 0.0))
    return base + quiet, base + max(top, 5 * quiet)
