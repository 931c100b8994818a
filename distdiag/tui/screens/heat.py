"""Heat: rank x step. One rank, one step, or everywhere?"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.store.rows import StepRow
from distdiag.tui.data.order import Cached
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.draw import bars
from distdiag.tui.draw.lines import BLANK, Line, Part, Screenful, explained, fitted, line
from distdiag.tui.draw.palette import HEAT_LEVELS
from distdiag.tui.draw.text import cells, clean, clip, fit, median_low, milliseconds, quantile
from distdiag.tui.header import title_line
from distdiag.tui.panels import brief_panel, finding_lines
from distdiag.tui.ui import Ui

NAMES = {
    "delta": "Δ self, ms against the median rank", "self_ms": "self ms (step - wait)", "wait_ms": "wait ms",
    "data_ms": "data ms", "forward_ms": "forward ms", "backward_ms": "backward ms", "optimizer_ms": "optimizer ms",
    "late_ms": "late ms, arrival after the first rank", "step_ms": "step ms",
}  # fmt: skip
SAMPLE = 64  # ranks that make the median of a step; all, up to so many
VALUES = 60_000  # read for one picture; of wider ones every k-th step
LABEL, TAIL = 10, 16
TALLEST = 6  # lines of one rank
NOT_MEASURED = "–"
ABOUT = (
    "one cell is a rank in a step, or in several; bright is slow against the other ranks, the scale is below the map"
)
ZOOMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # steps of one cell
_SQL = (
    "WITH RECURSIVE wanted(n) AS (VALUES (?1) UNION ALL SELECT n + ?3 FROM wanted WHERE n + ?3 <= ?2)"
    " SELECT step.rank, step.step, step.{column} FROM wanted CROSS JOIN step"
    " ON step.step = wanted.n AND step.rank IN ({marks})"
)


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


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> HeatData:
    """Read the steps of the ranks on the screen; steps read before are kept."""
    span = run.step_range(request.at_s)
    if span is None or not request.ranks:
        return HeatData(request.metric)
    per = request.per
    end = min(span[1], request.end if request.end is not None else span[1]) // per * per + per  # exclusive
    first, last = max(span[0] // per * per, end - request.window * per), min(end - 1, span[1])
    column = "self_ms" if request.metric == "delta" else request.metric
    n = len(frame.table)
    every = [int(r) for r in frame.table.numbers("rank")]
    sample = every if n <= SAMPLE else every[:: n // SAMPLE]
    wanted = sorted({*request.ranks, *sample}) if request.metric == "delta" else sorted(request.ranks)
    stride = 1
    while stride < per and (last - first) // stride * len(wanted) > VALUES:
        stride *= 2
    steps = _cached_steps(run, column, (first, last, stride), wanted, span[1], cache)
    values: dict[int, list[float | None]] = {r: [] for r in request.ranks}
    for begin in range(first, last + 1, per):
        cells: dict[int, float] = {}
        for step in range(begin, min(begin + per, last + 1), stride):
            row = steps.get(step, {})
            reference = 0.0
            if request.metric == "delta":
                reference = median_low([v for r in sample if (v := row.get(r)) is not None]) or 0.0
            for rank in request.ranks:
                v = row.get(rank)
                if v is not None and (rank not in cells or v - reference > cells[rank]):
                    cells[rank] = v - reference
        for rank in request.ranks:
            values[rank].append(cells.get(rank))
    low, high = _scale(request.metric, values, frame)
    step = request.step if request.step is not None else span[1]
    found = run.steps(step, step, [request.rank]) if request.rank is not None else []
    return HeatData(
        request.metric, first, last, values, low, high, per, stride, span[0], span[1], found[0] if found else None
    )


def _cached_steps(
    run: Run, column: str, span: tuple[int, int, int], ranks: list[int], newest: int, cache: dict[Any, Any]
) -> dict[int, dict[int, float | None]]:
    """Return values by step and rank; only steps that are not in the cache are read."""
    first, last, stride = span
    key = (column, tuple(ranks), stride)
    steps: dict[int, dict[int, float | None]] = cache.get("heat", {}) if cache.get("heat_key") == key else {}
    for s in [s for s in steps if s < first or s > last or s >= newest - 1]:  # the newest may have lacked ranks
        del steps[s]
    missing = [s for s in range(first, last + 1, stride) if s not in steps]
    if missing:
        marks = ",".join(f"?{i + 4}" for i in range(len(ranks)))
        sql = _SQL.format(column=column, marks=marks)
        for s in missing:
            steps[s] = {}
        for rank, step, value in run.query(sql, (missing[0], missing[-1], stride, *ranks)):
            steps[step][rank] = value
    cache["heat_key"], cache["heat"] = key, steps
    return steps


def _scale(metric: str, values: dict[int, list[float | None]], frame: Frame) -> tuple[float, float]:
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


def digit(value: float | None, low: float, high: float) -> str:
    """Return `.` up to `low`, `1` to `9` from there to `high` and beyond, `–` if not measured."""
    if value is None or math.isnan(value):
        return NOT_MEASURED
    if value <= low:
        return "."
    return str(min(9, 1 + int((value - low) / (high - low) * 8)))


def level(value: float | None, low: float, high: float) -> int | None:
    """Return the level of the colour scale: 0 up to `low`, the last one from `high` on; None if not measured."""
    if value is None or math.isnan(value):
        return None
    if value <= low:
        return 0
    return min(HEAT_LEVELS - 1, 1 + int((value - low) / (high - low) * (HEAT_LEVELS - 2)))


_STYLES = {
    ".": "muted",
    NOT_MEASURED: "muted",
    **dict.fromkeys("123", ""),
    **dict.fromkeys("456", "warning"),
    **dict.fromkeys("789", "error"),
}


class HeatPage:
    name = "heat"
    title = "heat"
    question = "one rank, one step, or everywhere?"

    def __init__(self) -> None:
        self.order = Cached(time.monotonic)

    # -- where the person looks -----------------------------------------------------------------------------------

    def pan(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Move the cursor by so many cells; the picture follows at its edges."""
        data = snap.panel
        if isinstance(data, HeatData) and data.last >= data.first:
            at = data.newest if ui.step is None else ui.step
            at = max(data.oldest, at + by * data.per)
            ui.step = None if at >= data.newest else at

    def zoom(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Show fewer (`by` > 0) or more steps in one cell."""
        at = ZOOMS.index(ui.per) - by
        ui.per = ZOOMS[max(0, min(len(ZOOMS) - 1, at))]

    def click(self, snap: Snapshot, ui: Ui, rank: int, x: int) -> None:
        """Put the cursor on the cell that was clicked."""
        data = snap.panel
        if isinstance(data, HeatData) and 0 <= x - LABEL < len(data.values.get(rank, ())):
            ui.cursor["heat"] = rank
            at = data.first + (x - LABEL) * data.per
            ui.step = None if at + data.per > data.newest else at

    def _window(self, width: int) -> int:
        room = width - LABEL - TAIL
        return max(10, room // 10 * 10)

    def _room(self, height: int, tail: int) -> int:
        return max(1, height - 3 - 5 - 2 - tail)

    def _rows(self, n: int, ui: Ui, height: int, tail: int) -> tuple[int, int]:
        """Return the ranks on the screen, and how many share a line."""
        lines = self._room(height, tail)
        pair = 2 if ui.drawn and n > lines else 1
        return lines * pair, pair

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        items = self.items(snap, ui)
        room, _ = self._rows(len(items), ui, height, len(brief_panel(snap, ui, width, height)))
        top, index = ui.window("heat", items, room)
        window = self._window(width)
        if ui.step is None:
            ui.end_step = None
        else:
            data = snap.panel
            newest = data.newest if isinstance(data, HeatData) else snap.newest_step or 0
            end = newest if ui.end_step is None else ui.end_step
            ui.end_step = max(ui.step, min(end, ui.step + (window - 1) * ui.per))
        return Request(
            "heat", ui.paused_at_s, items[index] if index is not None and items else None, tuple(items[top : top + room]),
            window, ui.metric, per=ui.per, end=ui.end_step, step=ui.step,
        )  # fmt: skip

    def items(self, snap: Snapshot, ui: Ui) -> list[int]:
        return self.order.ranks(snap, ui)

    # -- drawing --------------------------------------------------------------------------------------------------

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, HeatData) else HeatData(ui.metric)
        span = f"steps {data.first}–{data.last}" if data.last >= data.first else "no steps yet"
        keys = (
            f"   filter: {clean(ui.filter.text)}" if ui.filter.text else "   m metric   ←→ cursor   + - zoom   s order"
        )
        lines = [
            title_line(snap, ui, width, self.title, self.question, span),
            fitted((*_name(ui.metric), *line((keys, "muted"))), width),
        ]
        tail = brief_panel(snap, ui, width, height)
        items = self.items(snap, ui)
        if data.last < data.first or not items:
            text = (
                f"   no rank passes the filter `{clean(ui.filter.text)}`"
                if ui.filter.text and snap.frame
                else "   No steps yet. Rows appear with the first optimizer step."
            )
            lines += [BLANK, line((text, "muted"))]
            lines += [BLANK] * (height - len(lines) - len(tail))
            return Screenful([*lines, *tail][:height])
        room, pair = self._rows(len(items), ui, height, len(tail))
        top, index = ui.window("heat", items, room)
        shown = items[top : top + room]
        column = self._column(data, ui)
        lines.append(_axis(data, column if ui.interactive else None))
        rows = {} if snap.frame is None else {int(r): i for i, r in enumerate(snap.frame.table.numbers("rank"))}
        cursor = None
        chosen = items[index] if index is not None else None
        tall = max(1, min(TALLEST, self._room(height, len(tail)) // len(items))) if ui.drawn else 1
        above = (tall - 1) // 2
        for nth in range(0, len(shown), pair):
            some = shown[nth : nth + pair]
            if chosen in some:
                cursor = len(lines) + above
            at = [rows[r] for r in some]
            lines += [_wordless(self._row(snap, ui, data, some, at, None, -1))] * above if above else []
            lines.append(self._row(snap, ui, data, some, at, chosen, column))
            lines += [_wordless(self._row(snap, ui, data, some, at, None, -1))] * (tall - 1 - above) if tall > 1 else []
        legend = [*self._cursor_lines(snap, ui, data, chosen, width), *_legend(data, ui, top, len(shown), len(items))]
        space = height - len(lines) - len(tail)
        lines += ([BLANK, *legend] if space > len(legend) else legend)[: max(0, space)]
        lines += [BLANK] * (height - len(lines) - len(tail))
        return Screenful([*(fitted(x, width) for x in lines), *tail][:height], room, cursor)

    def _column(self, data: HeatData, ui: Ui) -> int:
        """Return the cell of the cursor, from the left."""
        at = data.last if ui.step is None else ui.step
        return max(0, min((data.last - data.first) // data.per, (at - data.first) // data.per))

    def _row(
        self, snap: Snapshot, ui: Ui, data: HeatData, ranks: list[int], at: list[int], chosen: int | None, column: int
    ) -> Line:
        """Return one line of the map: a rank, or two as the halves of a line."""
        assert snap.frame is not None
        mark = max((snap.summary.marks[i] for i in at), key=lambda m: m.level)
        here = chosen in ranks
        label = f"{ranks[0]:>5}  " if len(ranks) == 1 else fit(f"{ranks[0]:>3},{ranks[1]}", 7)
        lead = ("bold" if mark.level > 1 else "") + (" cursor" if here else "")
        parts: list[Part] = [
            (f" {mark.glyph} ", f"{mark.style} cursor".strip() if here else mark.style, ""),
            (label, lead.strip(), ""),
        ]
        blank: list[float | None] = [None] * (
            (data.last - data.first) // data.per + 1
        )  # scrolled into view; read with the next snapshot
        values = [data.values.get(r) or blank for r in ranks]
        for x in range(len(values[0])):
            under = x == column and here and ui.interactive
            if not ui.drawn:
                text = digit(values[0][x], data.low, data.high)
                style = _STYLES[text] + (" cursor" if under else "")
            else:
                text, style = _cell([level(v[x], data.low, data.high) if x < len(v) else None for v in values], under)
            if parts[-1][1] == style and len(parts) > 2:
                parts[-1] = (parts[-1][0] + text, style, "")
            else:
                parts.append((text, style.strip(), ""))
        parts.append(self._tail(snap, ranks[0], at[0], values[0]) if len(ranks) == 1 else ("", "", ""))
        return tuple((t, s, f"cell:{ranks[0]}") for t, s, _ in parts if t)

    def _tail(self, snap: Snapshot, rank: int, i: int, values: list[float | None]) -> Part:
        assert snap.frame is not None
        worst = snap.frame.table.numbers("slowest_in")[i]
        if worst == worst:
            of = min(50, snap.summary.step or 50)
            return (f"  {int(worst)}/{of} slowest", "" if worst >= of / 2 else "muted", "")
        mean = [v for v in values if v is not None]
        return (f"  mean {milliseconds(sum(mean) / len(mean) if mean else None)}", "muted", "")

    def _cursor_lines(self, snap: Snapshot, ui: Ui, data: HeatData, rank: int | None, width: int) -> list[Line]:
        """Return rank, step and phases under the cursor, and the finding that names the rank."""
        if rank is None or not ui.interactive:
            return []
        step = data.newest if ui.step is None else ui.step
        c = data.cell
        head: list[Part] = [(f" ◆ rank {rank}  step {step}  ", "bold", "")]
        if c is None or c.rank != rank or c.step != step or c.step_ms is None:
            out: list[Line] = [(*head, ("not measured", "muted", ""))]
        else:
            text = (
                f"step {milliseconds(c.step_ms)} ms  self {milliseconds(c.self_ms)}  wait {milliseconds(c.wait_ms)}  "
            )
            room = width - len(head[0][0]) - len(text) - 2
            bar = bars.stacked(bars.phases_of(c), c.step_ms, room, colour=ui.drawn) if room >= 16 else []
            out = [(*head, (text, "", ""), *bar)]
        # the worst finding is in the last line already
        named = next((f for f in snap.open_findings[1:] if rank in f.culprits), None)
        return [*out, *(finding_lines(named, width, full=False) if named else [])]


def _wordless(row: Line) -> Line:
    """Return the map of one row, without what is at its left and right."""
    left = sum(cells(t) for t, _, _ in row[:2])
    return ((" " * left, "", row[0][2]), *row[2:-1])


def _cell(levels: list[int | None], under: bool) -> tuple[str, str]:
    """Return glyph and style of one cell, or of two in its halves; the cursor is a mark on it."""
    upper, lower = levels[0], levels[-1]
    if under:
        at = upper if upper is not None else lower
        return "◆", "bold" if at is None else f"in-heat{at}"
    if upper == lower:
        return (" ", f"on-heat{upper}") if upper is not None else ("·", "muted")
    if lower is None:
        return "▀", f"area-heat{upper}"
    if upper is None:
        return "▄", f"area-heat{lower}"
    return "▀", f"area-heat{upper} on-heat{lower}"


def _axis(data: HeatData, column: int | None) -> Line:
    n = (data.last - data.first) // data.per + 1
    out = ""
    for i in range(0, n, 10):
        label = str(data.first + i * data.per)
        out = out.ljust(i)
        if len(out) == i:
            out += label + " "
    text = out.rstrip()
    if column is None:
        return line((" " * LABEL + text, "head"))
    text = text.ljust(column + 1)
    return line((" " * LABEL + text[:column], "head"), ("↓", "key"), (text[column + 1 :], "head"))


def _name(metric: str) -> Line:
    name = NAMES.get(metric, metric)
    return explained(line(" ", (name, "bold")), name, ABOUT)


def _legend(data: HeatData, ui: Ui, top: int, shown: int, n: int) -> list[Line]:
    step = (data.high - data.low) / 8
    low, high = milliseconds(data.low), milliseconds(data.high)
    if ui.drawn:
        ramp = [(" ", f"on-heat{i}", "") for i in range(HEAT_LEVELS)]
        out = [
            (
                *line((f" scale  up to {low} ms ", "muted")),
                *ramp,
                *line((f" {high} ms and above   · not measured", "muted")),
            )
        ]
    else:
        first, second = milliseconds(data.low + step), milliseconds(data.low + 2 * step)
        scale = f" scale  . to {low} ms   1 to {first}   2 to {second} … 8 to {high}   9 above   {NOT_MEASURED} not measured"
        out = [line((scale, "muted"))]
    if data.per > 1:
        every = f", of which one in {data.stride} is read" if data.stride > 1 else ""
        out.append(line((f" cell   the highest of {data.per} steps{every}", "muted")))
    column = "one uneven step" if data.metric in ("delta", "late_ms") else "one bad step (all ranks)"
    out.append(line((f" reads  one row lit: that rank.  one column lit: {column}.", "muted")))
    out.append(line(("        scattered: jitter.  the rows of one host lit together: that node.", "muted")))
    if shown < n:
        out.insert(0, line((clip(f" rows {top + 1:,}–{top + shown:,} of {n:,}", 60), "muted")))
    return out
