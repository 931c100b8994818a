"""Charts of values over time in braille dots or blocks, with axes and units; a few lines high."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distdiag.tui.draw.lines import BLANK, Line, Part, explained, fitted, line, merged, width_of
from distdiag.tui.draw.text import clock, fit

LABEL = 7  # cells left of the axis
MIN_HEIGHT, MIN_WIDTH = 5, 34  # of one chart
TALLEST = 22  # lines of one chart
GAP = 2  # cells between two charts
# seconds of one dot: the smallest that shows the whole span is taken, so that the picture changes seldom
_STEPS = tuple(f * 10**k for k in range(-2, 5) for f in (1, 1.2, 1.5, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
_TOPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a braille cell: left and right column, from below
# of each column: all dots from one to another
_RUNS = [[[sum(column[a : b + 1]) for b in range(4)] for a in range(4)] for column in _DOTS]
_BRAILLE = [" ", *map(chr, range(0x2801, 0x2900))]


@dataclass(frozen=True)
class Curve:
    """One line or area of a chart: rising times in seconds, and values; None where not measured."""

    name: str
    times: Sequence[float]
    values: Sequence[float | None]
    style: str  # of the dots
    filled: bool = False  # down to the axis
    # how the values of one dot become one
    pick: Callable[[list[float]], float] = field(default=lambda v: sum(v) / len(v))
    bridge_s: float = 0.0  # gaps up to so long are bridged, whatever the other gaps are


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    show: Callable[[float | None], str]  # number to text, without the unit
    floor: float | None = 0.0  # smallest value of the axis; None starts at the smallest value shown
    top: float | None = None  # largest value of the axis; None ends at the largest value shown
    marks: tuple[tuple[float, str], ...] = ()  # moments to mark on the axis, and the style of the mark
    # first and last moment of times to mark on the axis, and the style of the marks
    spans: tuple[tuple[float, float, str], ...] = ()
    help: str = ""  # what it shows, and of whom; the unit is added
    # the title ends with the newest values; not if the screen has them elsewhere, of another span
    with_newest: bool = True
    explains_marks: bool = False  # the title says that a mark is a finding


def buckets(curve: Curve, end: float, step: float, n: int) -> list[float | None]:
    """Return the curve as `n` values of `step` seconds each, the last one ending at `end`; short gaps are bridged."""
    start = end - step * n
    times, values = curve.times, curve.values
    at = [bisect_left(times, start + i * step) for i in range(1, n)]
    edges = itertools.pairwise([bisect_right(times, start), *at, bisect_right(times, end)])
    found = ([v for v in values[a:b] if v is not None and math.isfinite(v)] for a, b in edges)
    out: list[float | None] = [curve.pick(v) if v else None for v in found]
    known = [i for i, v in enumerate(out) if v is not None]
    gaps = sorted(b - a for a, b in itertools.pairwise(known))
    longest = max(2, 3 * gaps[len(gaps) // 2], curve.bridge_s / step) if gaps else 0  # a pause of the job stays a gap
    for a, b in itertools.pairwise(known):
        if b - a <= longest:
            out[a + 1 : b] = [out[a]] * (b - a - 1)
    return out


def draw(chart: Chart, start: float, now: float, width: int, height: int, ascii_only: bool = False) -> list[Line]:
    """Return the chart in `height` lines (at least 4) of at most `width` cells: title, plot, axis.

    It shows the time from `start`, the run's first moment, up to `now`, or as much of it as fits.
    """
    columns = max(4, width - LABEL - 1)
    per_cell, rows = (1, 1) if ascii_only else (2, 4)
    n, levels = columns * per_cell, (height - 2) * rows
    span = max(now - start, 1.0)
    step = next((s for s in _STEPS if s * n >= span), span / n)
    end = math.ceil(now / step) * step
    series = [buckets(c, end, step, n) for c in chart.curves]
    known = [v for s in series for v in s if v is not None]
    title = _title(chart, series, width)
    if not known:
        empty = [line((" " * LABEL + "│", "muted"))] * (height - 2)
        return [title, *empty, line((" " * LABEL + "└ not measured yet", "muted"))]
    low, high = _range(chart, known)
    grid: list[list[int]] = [[0] * columns for _ in range(height - 2)]
    style: list[list[str]] = [[""] * columns for _ in range(height - 2)]
    for curve, values in zip(chart.curves, series, strict=True):
        before: int | None = None
        for i, v in enumerate(values):
            if v is None:
                before = None
                continue
            y = min(levels - 1, max(0, int((v - low) / (high - low) * (levels - 1) + 0.5)))
            first = 0 if curve.filled else y if before is None else min(y, before + (y > before))
            last = y if curve.filled or before is None else max(y, before - (y < before))
            c, runs = i // per_cell, _RUNS[i % 2]
            (low_cell, low_dot), (high_cell, high_dot) = divmod(first, rows), divmod(last, rows)
            for cell in range(low_cell, high_cell + 1):
                r = height - 3 - cell
                grid[r][c] |= runs[low_dot if cell == low_cell else 0][high_dot if cell == high_cell else rows - 1]
                style[r][c] = curve.style
            before = y
    out = [title]
    for r in range(height - 2):
        label = chart.show(high) if r == 0 else chart.show(low) if r == height - 3 and height > 4 else ""
        parts: list[Part] = [(fit(label, LABEL - 1, ">") + " │", "muted", "")]
        glyphs = (
            "".join("*" if d else " " for d in grid[r]) if ascii_only else "".join(map(_BRAILLE.__getitem__, grid[r]))
        )
        at = 0
        for name, cells in itertools.groupby(style[r]):
            n_cells = len(list(cells))
            parts.append((glyphs[at : at + n_cells], name, ""))
            at += n_cells
        out.append(tuple(parts))
    out.append(_axis(chart, end - step * n, end, now, columns))
    return out


def _range(chart: Chart, known: list[float]) -> tuple[float, float]:
    """Return the lowest and highest value of the axis; one slow first step does not flatten all others."""
    ordered = sorted(known)
    low = ordered[0] if chart.floor is None else chart.floor
    high = ordered[-1]
    most = ordered[int(0.9 * (len(ordered) - 1))]  # the slow step may hold some columns of a short span
    if high > 3 * most > 0:
        high = most * 1.5
    if chart.floor is not None:
        if chart.top is not None:
            return low, chart.top
        tens = 10 ** math.floor(math.log10(high)) if high > 0 else 1.0
        high = next(t * tens for t in _TOPS if t * tens >= high * 1.02 or t == _TOPS[-1])
    else:
        pad = max((high - low) * 0.05, abs(high) * 0.01)
        low, high = low - pad if low - pad > 0 or low < 0 else low, high + pad
    return low, max(high, low + 1e-9)


def _title(chart: Chart, series: list[list[float | None]], width: int) -> Line:
    values = []
    for curve, found in reversed(list(zip(chart.curves, series, strict=True))):  # the one on top first
        newest = next((v for v in reversed(found) if v is not None), None)
        values.append((curve, chart.show(newest) if chart.with_newest else ""))
    parts: list[Part | tuple[str, str] | str] = [
        (f" {chart.title}", "bold"),
        (f" {chart.unit}" if chart.unit else "", "muted"),
    ]
    swatches = len(values) > 1 and (width >= 44 or not chart.with_newest)
    for curve, text in values:
        parts += [
            "  ",
            ("▬ " if swatches else "", curve.style),
            (f"{curve.name} " if curve.name else "", "muted"),
            text,
        ]
    if chart.marks and chart.explains_marks and width_of(line(*parts)) + 11 <= width:
        parts += ["  ", ("▲ ", chart.marks[-1][1]), ("finding", "muted")]
    return fitted(line(*parts), width)


def _axis(chart: Chart, start: float, end: float, now: float, columns: int) -> Line:
    """Return the time axis: times of the run at both ends, marks where something began or lasted."""
    left, right = clock(max(0.0, start)), clock(now)
    cells_of: list[tuple[str, str]] = [("─", "muted")] * columns

    def cell(t_s: float) -> int:
        return int((t_s - start) / (end - start) * columns) if end > start else -1

    for first, last, style in chart.spans:
        for at in range(max(0, cell(first)), min(columns, cell(last) + 1)):
            cells_of[at] = ("▲", style)
    marks = {cell(t): style for t, style in chart.marks if 0 <= cell(t) < columns}
    taken, last = len(left) + 2, columns - len(right) - 2
    free = (x for x in range(last, taken, -1) if not any(x < m < x + len(right) + 2 for m in marks))
    last = next(free, last)  # next to a mark a clock can be read
    first = next((x for x in range(last - taken) if not any(x <= m < x + taken for m in marks)), 0)
    for text, at in ((f" {left} ", first), (f" {right} ", last)):
        if at >= 0 and at + len(text) <= columns:  # over a span in its style
            cells_of[at : at + len(text)] = [(c, cells_of[at + i][1]) for i, c in enumerate(text)]
    for at, style in marks.items():
        cells_of[at] = ("▲", style)
    return merged([(" " * LABEL + "└", "muted", ""), *((glyph, style, "") for glyph, style in cells_of)])


def side_by_side(blocks: Sequence[list[Line]], width: int) -> list[Line]:
    """Return several blocks of equal height in columns of equal width."""
    each = (width - GAP * (len(blocks) - 1)) // len(blocks)
    out = []
    for row in range(max(map(len, blocks))):
        parts: list[Part] = []
        for i, block in enumerate(blocks):
            text = fitted(block[row], each) if row < len(block) else ()
            last = i == len(blocks) - 1
            parts += text if last else [*text, (" " * (each - width_of(text) + GAP), "", "")]
        out.append(tuple(parts))
    return out


def grid(
    charts: Sequence[Chart], start: float, now: float, width: int, height: int, ascii_only: bool = False
) -> list[Line]:
    """Return as many charts as fit into `height` lines, in up to three rows; empty if none fits."""
    if height < MIN_HEIGHT or width < MIN_WIDTH or not charts:
        return []
    fits = max(1, (width + 1) // (MIN_WIDTH + 1))
    rows = 2 if height >= 2 * MIN_HEIGHT + 3 and len(charts) > min(3, max(2, fits)) else 1
    if len(charts) > 2 * fits and height >= 3 * MIN_HEIGHT + 2:
        rows = 3
    across = min(fits, -(-len(charts) // rows))
    each = min((height - (rows - 1)) // rows, TALLEST)
    cell = (width - (across - 1) * 2) // across
    out: list[Line] = []
    for first in range(0, min(len(charts), across * rows), across):
        blocks: list[list[Line]] = [[] for _ in range(across)]
        for block, chart in zip(blocks, charts[first : first + across], strict=False):
            term = f"{chart.title}, {chart.unit}" if chart.unit else chart.title
            made = draw(chart, start, now, cell, each, ascii_only)
            block += [explained(x, term, chart.help) for x in made]
        out += ([BLANK] if out else []) + side_by_side(blocks, width)
    return out[:height]
