"""Charts of the job over time: step time, waiting, throughput, loss and exposed communication."""

from __future__ import annotations

from distdiag.terms.quantiles import quantile
from distdiag.terms.steps import RATE
from distdiag.tui.data.history import Point
from distdiag.tui.draw.charts import Chart, Curve, grid
from distdiag.tui.draw.lines import Line
from distdiag.tui.draw.text import MISSING, decimal, milliseconds, percent

BRIDGED_STEPS = 120  # without a value between two that DDP timed: it times one step in 8, 32 or 100


def _p(q: float):
    return lambda values: quantile(sorted(values), q) or 0.0


def charts(points: tuple[Point, ...], marks: tuple[tuple[float, str], ...], with_area: bool) -> list[Chart]:
    """Return the charts that have values: always step time, then waiting, throughput, loss and exposed communication."""
    times = [p.t_s for p in points]
    steps = [p.step_ms for p in points]
    found = [
        Chart(
            "step time", "ms",
            (Curve("p95", times, steps, "area-band", pick=_p(0.95)), Curve("p50", times, steps, "accent", pick=_p(0.5))),
            milliseconds, marks=marks, with_newest=False, explains_marks=True, help="median (p50) and 95th percentile (p95) of the steps that one dot holds",
        )
    ]  # fmt: skip
    more = (
        ("waiting", "of step time", [p.wait_pct for p in points], "area-hot", percent, 0.0, "ranks waiting for other ranks in collectives"),
        ("throughput", "samples/s", [p.samples_per_s for p in points], "area-optimizer", _short, 0.0, RATE),
        ("loss", "", [p.loss for p in points], "accent", _loss, None, "as the job logged it, mean of its ranks"),
        ("exposed communication", "of step time", [p.exposed_pct for p in points], "area-transfer", percent, 0.0, "averaging gradients that no computation hides, as DDP timed it"),
    )  # fmt: skip
    for title, unit, values, style, show, floor, about in more:
        if any(v is not None for v in values):
            filled = with_area and floor is not None
            known = sorted(ms for ms in steps if ms) if title.startswith("exposed") else []
            bridge_s = BRIDGED_STEPS * known[len(known) // 2] / 1e3 if known else 0.0
            curve = Curve("", times, values, style, filled, bridge_s=bridge_s)
            found.append(Chart(title, unit, (curve,), show, floor, marks=marks, with_newest=False, help=about))
    return found


def _short(v: float | None) -> str:
    if v is None or v != v:
        return MISSING
    return decimal(v, 1) if v < 100 else decimal(v, 0) if v < 100_000 else f"{v / 1000:,.0f}k"


def _loss(v: float | None) -> str:
    if v is None or v != v:
        return MISSING
    digits = f"{v:.4g}"
    return digits if len(digits) <= 6 else f"{v:.3g}" if 1e-3 <= abs(v) < 10_000 else f"{v:.1e}"


def chart_lines(
    points: tuple[Point, ...],
    now: float,
    width: int,
    height: int,
    marks: tuple[tuple[float, str], ...],
    ascii_only: bool,
) -> list[Line]:
    """Return as many charts as fit into `height` lines; empty if none fits, or if no step has ended."""
    if not points:
        return []
    # a long first step (start of DDP, compilation) would leave half of each chart empty
    first_s = (points[0].step_ms or 0.0) / 1000
    start = max(0.0, points[0].t_s - min(first_s, max(1.0, 0.05 * (now - points[0].t_s))))
    return grid(charts(points, marks, with_area=not ascii_only), start, now, width, height, ascii_only)
