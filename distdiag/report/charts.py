"""The report's charts as inline SVG; they hold numbers only, no text from the job.

The salt makes the same run give the same file, and keeps the ids of two charts on one page apart.

Colours are Okabe and Ito's, which every kind of colour vision can distinguish; no meaning depends on red against green.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from distdiag.diagnosis.model.findings import Finding
from distdiag.report.facts import RankSummary
from distdiag.report.steps import SeriesPoint
from distdiag.terms import steps
from distdiag.traces.model import RankTimes, parts_of

_PALE = ("wait", "idle")  # drawn in the colour of a light ground
LABELS = {
    "h2d": "host to device",
    "wait": "waiting for other ranks",
    "hidden": "compute and communication",
    "transfer": "communication",
}
# placeholders, replaced by colours of the page's theme
_INK, _LINE = "#010203", "#040506"


def style(ink: str, line: str) -> dict[str, Any]:
    """Return matplotlib's settings for these charts, in a colour for text and axes and one for the grid."""
    drawn_in_ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return dict.fromkeys(drawn_in_ink, ink) | {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": line,
        "axes.axisbelow": True,
    }


# text stays text: small, searchable
_PAGE: Any = style(_INK, _LINE) | {"svg.fonttype": "none", "savefig.transparent": True}


def svg(draw: Callable[..., None], *what: Any) -> str:
    """Return what `draw` draws of `what` into an empty figure, in the colours of the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_PAGE | {"svg.hashsalt": draw.__name__}):
        figure = Figure(layout="constrained")
        draw(figure, *what)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue().replace(_INK, "currentColor").replace(_LINE, "var(--line)")
    return text[text.index("<svg") :]


def draw_step_time(figure: Figure, points: Sequence[SeriesPoint], findings: Sequence[Finding]) -> None:
    """Draw the job's step time, below it the loss if it was logged; the first step of each finding is marked."""
    losses = [p for p in points if p.loss is not None]
    figure.set_size_inches(9, 3.9 if losses else 2.6)
    rows = figure.subplots(2 if losses else 1, 1, sharex=True, squeeze=False)[:, 0]
    x = np.array([p.step for p in points])
    rows[0].fill_between(
        x, [p.low_ms for p in points], [p.high_ms for p in points], color="#56B4E9", alpha=0.35, linewidth=0
    )
    rows[0].plot(x, [p.step_ms for p in points], color="#0072B2", linewidth=1.2)
    rows[0].set_ylabel("step time, ms")
    rows[0].set_ylim(0, top_of_axis([p.high_ms for p in points]))
    for f in findings:
        if f.step is not None and points[0].step <= f.step <= points[-1].step_end:
            rows[0].axvline(f.step, color="#D55E00", linewidth=0.9, linestyle="--")
    if losses:
        ink = matplotlib.rcParams["text.color"]
        rows[1].plot([p.step for p in losses], [p.loss for p in losses], color=ink, linewidth=1.0)
        rows[1].set_ylabel("loss")
    rows[-1].set_xlabel("step")


def top_of_axis(values: Sequence[float]) -> float:
    """Return where an axis ends: some slow steps (compilation, warm-up) must not compress the others."""
    high, most = max(values), float(np.percentile(values, 95, method="lower"))
    return 1.05 * (1.5 * most if high > 3 * most > 0 else high) or 1.0


def draw_phases(figure: Figure, ranks: Sequence[RankSummary]) -> None:
    """Draw a bar per rank: its step by phases. Waiting for other ranks is taken out of backward and drawn last."""
    draw_bars(figure, [r.rank for r in ranks], [steps.split(r) for r in ranks], "ms per step (medians)")


def draw_profile(figure: Figure, ranks: Sequence[RankTimes]) -> None:
    draw_bars(figure, [r.rank for r in ranks], [parts_of(r) for r in ranks], "ms per step")


def draw_bars(figure: Figure, ranks: Sequence[int], parts: Sequence[Mapping[str, float]], axis: str) -> None:
    """Draw a bar per rank of parts one after the other. The legend leaves out a part that no rank has."""
    figure.set_size_inches(9, 0.9 + 0.3 * len(ranks))
    axes = figure.subplots()
    y, left = np.arange(len(ranks)), np.zeros(len(ranks))
    for name in parts[0] if parts else ():
        width = np.maximum(0.0, np.array([p[name] for p in parts]))
        if width.any():
            colour = steps.BY_NAME[name].colour[name in _PALE]
            axes.barh(y, width, 0.62, left=left, color=colour, label=LABELS.get(name, name))
        left += width
    axes.set_yticks(y, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    axes.grid(visible=False, axis="y")
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False)
