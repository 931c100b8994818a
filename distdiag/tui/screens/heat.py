"""Heat: rank x step. One rank, one step, or everywhere?"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from distdiag.store.reader import Frame, Run
from distdiag.tui.header import title_line
from distdiag.tui.lines import BLANK, Line, Part, Screenful, fitted, line, marked, rule
from distdiag.tui.order import Cached
from distdiag.tui.panels import summary_line
from distdiag.tui.snapshot import Request, Snapshot
from distdiag.tui.text import clean, median_low, milliseconds, quantile
from distdiag.tui.ui import Ui

NAMES = {
    "delta": "Δ self, ms against the median rank", "self_ms": "self ms (step - wait)", "wait_ms": "wait ms",
    "data_ms": "data ms", "forward_ms": "forward ms", "backward_ms": "backward ms", "optimizer_ms": "optimizer ms",
    "late_ms": "late ms, arrival after the first rank", "step_ms": "step ms",
}  # fmt: skip
SAMPLE = 64  # ranks that make the median of a step; all, up to so many
LABEL, TAIL = 10, 16
NOT_MEASURED = "–"


@dataclass(frozen=True)
class HeatData:
    """Values per rank and step; None where not measured."""

    metric: str = "delta"
    first: int = 0
    last: int = -1
    values: dict[int, list[float | None]] = None  # type: ignore[assignment]
    low: float = 0.0  # up to here a cell is quiet
    high: float = 1.0  # from here on it is at its hottest


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> HeatData:
    """Read the steps of the ranks on the screen; steps read before are kept."""
    span = run.step_range(request.at_s)
    if span is None or not request.ranks:
        return HeatData(request.metric, values={})
    first, last = max(span[0], span[1] - request.window + 1), span[1]
    column = "self_ms" if request.metric == "delta" else request.metric
    n = len(frame.table)
    every = [int(r) for r in frame.table.numbers("rank")]
    sample = every if n <= SAMPLE else every[:: n // SAMPLE]
    wanted = sorted({*request.ranks, *sample}) if request.metric == "delta" else sorted(request.ranks)
    key = (column, tuple(wanted))
    steps: dict[int, dict[int, float | None]] = cache.get("heat", {}) if cache.get("heat_key") == key else {}
    # the newest steps may lack ranks that had not written yet
    known = [s for s in steps if first <= s <= last]
    begin = max(known) - 1 if known and min(known) <= first else first
    for s in [s for s in steps if s < first or s >= begin]:
        del steps[s]
    for rank, step, value in run.step_column(column, begin, last, wanted):
        steps.setdefault(step, {})[rank] = value
    cache["heat_key"], cache["heat"] = key, steps
    values: dict[int, list[float | None]] = {r: [] for r in request.ranks}
    for step in range(first, last + 1):
        row = steps.get(step, {})
        reference = 0.0
        if request.metric == "delta":
            reference = median_low([v for r in sample if (v := row.get(r)) is not None]) or 0.0
        for rank in request.ranks:
            value = row.get(rank)
            values[rank].append(None if value is None else value - reference)
    low, high = _scale(request.metric, values, frame)
    return HeatData(request.metric, first, last, values, low, high)


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
    """`.` up to `low`, `1` to `9` from there to `high` and beyond, `–` where not measured."""
    if value is None or math.isnan(value):
        return NOT_MEASURED
    if value <= low:
        return "."
    return str(min(9, 1 + int((value - low) / (high - low) * 8)))


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

    def _window(self, width: int) -> int:
        room = width - LABEL - TAIL
        return max(10, room // 10 * 10)

    def _room(self, height: int) -> int:
        return max(1, height - 3 - 5 - 2)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        items = self.items(snap, ui)
        room = self._room(height)
        top, _ = ui.window("heat", items, room)
        return Request("heat", ui.paused_at_s, None, tuple(items[top : top + room]), self._window(width), ui.metric)

    def items(self, snap: Snapshot, ui: Ui) -> list[int]:
        return self.order.ranks(snap, ui)

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, HeatData) else HeatData(ui.metric, values={})
        span = f"steps {data.first}–{data.last}" if data.last >= data.first else "no steps yet"
        lines = [
            title_line(snap, ui, width, self.title, self.question, span),
            fitted(
                line(
                    " ",
                    (NAMES.get(ui.metric, ui.metric), "bold"),
                    (
                        f"   filter: {clean(ui.filter.text)}" if ui.filter.text else "   m next metric   s order",
                        "muted",
                    ),
                ),
                width,
            ),
        ]
        tail = [rule(width), summary_line(snap, width)]
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
        lines.append(_axis(data))
        room = self._room(height)
        top, index = ui.window("heat", items, room)
        cursor = None
        rows = {} if snap.frame is None else {int(r): i for i, r in enumerate(snap.frame.table.numbers("rank"))}
        for nth in range(top, min(len(items), top + room)):
            text = self._row(snap, data, items[nth], rows[items[nth]])
            if nth == index:
                cursor = len(lines)
                text = marked(text, width)
            lines.append(text)
        legend = _legend(data, width, top, min(len(items), top + room), len(items))
        space = height - len(lines) - len(tail)
        lines += ([BLANK, *legend] if space > len(legend) else legend)[: max(0, space)]
        lines += [BLANK] * (height - len(lines) - len(tail))
        return Screenful([*(fitted(x, width) for x in lines), *tail][:height], room, cursor)

    def _row(self, snap: Snapshot, data: HeatData, rank: int, i: int) -> Line:
        assert snap.frame is not None
        mark = snap.summary.marks[i]
        parts: list[Part] = [
            (f" {mark.glyph} ", mark.style, ""),
            (f"{rank:>5}  ", "bold" if mark.level > 1 else "", ""),
        ]
        values = data.values.get(rank)
        if values is None:  # scrolled into view; read with the next snapshot
            values = [None] * (data.last - data.first + 1)
        for value in values:
            d = digit(value, data.low, data.high)
            style = _STYLES[d]
            if parts[-1][1] == style and len(parts) > 2:
                parts[-1] = (parts[-1][0] + d, style, "")
            else:
                parts.append((d, style, ""))
        worst = snap.frame.table.numbers("slowest_in")[i]
        if worst == worst:
            of = min(50, snap.summary.step or 50)
            parts.append((f"  {int(worst)}/{of} slowest", "" if worst >= of / 2 else "muted", ""))
        else:
            mean = [v for v in values if v is not None]
            parts.append((f"  mean {milliseconds(sum(mean) / len(mean) if mean else None)}", "muted", ""))
        return tuple((t, s, f"row:{rank}") for t, s, _ in parts)


def _axis(data: HeatData) -> Line:
    n = data.last - data.first + 1
    out = ""
    for i in range(0, n, 10):
        label = str(data.first + i)
        out = out.ljust(i)
        if len(out) == i:
            out += label + " "
    return line((" " * LABEL + out.rstrip(), "head"))


def _legend(data: HeatData, width: int, a: int, b: int, n: int) -> list[Line]:
    step = (data.high - data.low) / 8
    scale = f" scale  . up to {milliseconds(data.low)} ms   1 –{milliseconds(data.low + step)}   2 –{milliseconds(data.low + 2 * step)} … 8 –{milliseconds(data.high)}   9 above   {NOT_MEASURED} not measured"
    out = [line((scale, "muted"))]
    out.append(line((" reads  one row lit: that rank.  one column lit: one bad step (all ranks).", "muted")))
    out.append(line(("        scattered: jitter.  the rows of one host lit together: that node.", "muted")))
    if b - a < n:
        out.insert(0, line((f" rows {a + 1:,}–{b:,} of {n:,}", "muted")))
    return out
