"""Pictures of a run as matplotlib figures, for notebooks: `open_run().plot`."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from distdiag.errors import DistdiagError, ExitCode
from distdiag.report import charts, facts, steps
from distdiag.store.reader import Run

MAX_CELLS = 400  # columns of a heat map
LEAST_SCALE_MS, LEAST_SHARE = 5.0, 0.25  # of the heat map's colours, and of the median step: noise must not glow
_STYLE: Any = charts.style("#333333", "#dddddd")


class Chart(Figure):
    """A figure that a notebook shows without `%matplotlib inline`."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


class Plot:
    """Pictures of one run. Every call reads the newest contents and returns a new matplotlib figure."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def steps(self) -> Figure:
        """Draw the job's step time, ms, and below it the loss, if it was logged.

        The line is the slowest rank's time (of many steps the median, in a band from the fastest to the slowest); a dashed line is
        the first step of a finding.

        Raises:
            DistdiagError: fewer than two steps were recorded.
        """
        points = steps.series(steps.job_steps(steps.read_steps(self._run)))
        if len(points) < 2:
            raise _no_steps(self._run)
        return _drawn(charts.draw_step_time, points, self._run.findings())

    def heat(self) -> Figure:
        """Draw each rank's own time in each step, ms more than the median rank: a slow rank is a row, a slow step a column.

        Own time is step - wait. Of many steps a cell shows the worst of several; white was not measured.

        Raises:
            DistdiagError: no own times were recorded.
        """
        found = steps.read_steps(self._run)
        ranks, first, per, cells = excess(found)
        if not ranks:
            raise _no_steps(self._run)
        known = cells[~np.isnan(cells)]
        least = LEAST_SHARE * (steps.median(found["step_ms"]) or 0.0)
        top = max(LEAST_SCALE_MS, least, float(np.percentile(known, 98)))
        with matplotlib.rc_context(_STYLE | {"axes.grid": False}):
            figure = Chart(figsize=(9, 1.4 + 0.25 * min(len(ranks), 32)), layout="constrained")
            axes = figure.subplots()
            span = (first - 0.5, first + per * cells.shape[1] - 0.5, len(ranks) - 0.5, -0.5)
            image = axes.imshow(
                cells, aspect="auto", interpolation="nearest", cmap="YlOrRd", vmin=0, vmax=top, extent=span
            )
            shown = range(0, len(ranks), -(-len(ranks) // 32))
            axes.set_yticks([*shown], [f"rank {ranks[i]}" for i in shown])
            axes.set_xlabel("step")
            figure.colorbar(image, ax=axes, label="Δ self, ms", shrink=0.9)
        return figure

    def ranks(self) -> Figure:
        """Draw a bar per rank: its step by phases, ms (medians). Waiting for other ranks is drawn last, in grey.

        Of more than 32 ranks those with the largest own time.

        Raises:
            DistdiagError: no steps were recorded.
        """
        every = facts.read_facts(self._run).ranks
        shown = facts.notable_ranks(tuple(r for r in every if r.step_ms is not None), 32)
        if not shown:
            raise _no_steps(self._run)
        return _drawn(charts.draw_phases, shown)


def _drawn(draw: Callable[..., None], *what: Any) -> Figure:
    with matplotlib.rc_context(_STYLE):
        figure = Chart(layout="constrained")
        draw(figure, *what)
    return figure


def excess(found: steps.Steps) -> tuple[list[int], int, int, steps.Floats]:
    """Return (ranks, first step, steps of a cell, ms by rank and cell): own time above the step's median rank, NaN if not measured."""
    known = found.where(~np.isnan(found["self_ms"]))
    if not len(known):
        return [], 0, 1, np.empty((0, 0))
    ranks, row = np.unique(known.rank, return_inverse=True)
    first = int(known.step.min())
    column = (known.step - first) // found.every
    own = np.full((len(ranks), int(column.max()) + 1), np.nan)
    own[row, column] = known["self_ms"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step or cell that no rank measured
        over = own - np.nanquantile(own, 0.5, axis=0, method="lower")
        per = -(-over.shape[1] // MAX_CELLS)
        missing = -over.shape[1] % per
        padded = np.pad(over, ((0, 0), (0, missing)), constant_values=np.nan)
        cells = np.nanmax(padded.reshape(len(ranks), -1, per), axis=2)
    return ranks.tolist(), first, per * found.every, cells


def _no_steps(run: Run) -> DistdiagError:
    return DistdiagError(
        f"{run.path} has too few steps for a picture", "a step ends with `optimizer.step()` or `handle.step()`",
        ExitCode.NO_DATA, "no_steps",
    )  # fmt: skip
