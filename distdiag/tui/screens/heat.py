"""Heat: rank x step. One rank, one step, or everywhere?"""

from __future__ import annotations

import math

from distdiag.tui.data import heat_data
from distdiag.tui.data.heat_data import METRICS, HeatData
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.draw import bars
from distdiag.tui.draw.lines import BLANK, Line, Part, Screenful, explained, line, merged
from distdiag.tui.draw.palette import HEAT_LEVELS
from distdiag.tui.draw.text import cells, clean, clip, fit, milliseconds
from distdiag.tui.panels import brief_panel, finding_lines
from distdiag.tui.screens.page import RankedPage
from distdiag.tui.ui import Ui

LABEL, TAIL = 10, 16
TALLEST = 6  # lines of one rank
NOT_MEASURED = "–"
ABOUT = (
    "one cell is a rank in a step, or in several; bright is slow against the other ranks, the scale is below the map"
)
ZOOMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # steps of one cell
_STYLES = {".": "muted", NOT_MEASURED: "muted"} | dict.fromkeys("456", "warning") | dict.fromkeys("789", "error")


def digit(value: float | None, low: float, high: float) -> str:
    """Return `.` up to `low`, `1` to `9` from there to `high` and beyond, `–` if not measured."""
    found = level(value, low, high, levels=10)
    return NOT_MEASURED if found is None else str(found or ".")


def level(value: float | None, low: float, high: float, levels: int = HEAT_LEVELS) -> int | None:
    """Return the level of the colour scale: 0 up to `low`, the last one from `high` on; None if not measured."""
    if value is None or math.isnan(value):
        return None
    return 0 if value <= low else min(levels - 1, 1 + int((value - low) / (high - low) * (levels - 2)))


class HeatPage(RankedPage[HeatData]):
    name = title = "heat"
    question = "one rank, one step, or everywhere?"
    empty = HeatData
    read = staticmethod(heat_data.read)

    def pan(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Move the cursor by so many cells; the picture follows at its edges."""
        data = self.data(snap)
        if data.last >= data.first:
            at = max(data.oldest, (data.newest if ui.step is None else ui.step) + by * data.per)
            ui.step = None if at >= data.newest else at

    def zoom(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Show fewer (`by` > 0) or more steps in one cell."""
        ui.per = ZOOMS[max(0, min(len(ZOOMS) - 1, ZOOMS.index(ui.per) - by))]

    def click(self, snap: Snapshot, ui: Ui, rank: int, x: int) -> None:
        data = self.data(snap)
        if 0 <= x - LABEL < len(data.values.get(rank, ())):
            ui.cursor["heat"] = rank
            at = data.first + (x - LABEL) * data.per
            ui.step = None if at + data.per > data.newest else at

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        items = self.order.ranks(snap, ui)
        room, _ = _rows(len(items), ui, height - len(brief_panel(snap, ui, width, height)))
        top, index = ui.window("heat", items, room)
        window = max(10, (width - LABEL - TAIL) // 10 * 10)
        if ui.step is None:
            ui.end_step = None
        else:
            newest = snap.panel.newest if isinstance(snap.panel, HeatData) else snap.newest_step or 0
            end = newest if ui.end_step is None else ui.end_step
            ui.end_step = max(ui.step, min(end, ui.step + (window - 1) * ui.per))
        return Request(
            "heat", ui.paused_at_s, items[index] if index is not None and items else None, tuple(items[top : top + room]),
            window, ui.metric, per=ui.per, end=ui.end_step, step=ui.step,
        )  # fmt: skip

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, HeatData) else HeatData(ui.metric)
        span = f"steps {data.first}–{data.last}" if data.last >= data.first else "no steps yet"
        name, shown = METRICS.get(ui.metric, ui.metric), clean(ui.filter.text)
        keys = f"   filter: {shown}" if shown else "   m metric   ←→ cursor   + - zoom   s order"
        sheet = self.sheet(snap, ui, width, height, span)
        sheet.add((*explained(line(" ", (name, "bold")), name, ABOUT), (keys, "muted", "")))
        items = self.order.ranks(snap, ui)
        if data.last < data.first or not items:
            nobody = f"   no rank passes the filter `{shown}`" if shown and snap.frame else ""
            sheet.add(BLANK)
            sheet.note(nobody or "   No steps yet. Rows appear with the first optimizer step.")
            return sheet.done()
        room = height - len(sheet.panel)
        sheet.rows, pair = _rows(len(items), ui, room)
        top, index = ui.window("heat", items, sheet.rows)
        chosen = items[index] if index is not None else None
        sheet.add(_axis(data, data.cell_of(ui.step) if ui.interactive else None))
        tall = max(1, min(TALLEST, _lines(room) // len(items))) if ui.drawn else 1
        above, on_screen = (tall - 1) // 2, items[top : top + sheet.rows]
        for nth in range(0, len(on_screen), pair):
            ranks = on_screen[nth : nth + pair]
            if chosen in ranks:
                sheet.cursor = len(sheet.lines) + above
            row = _row(snap, ui, data, ranks, chosen)
            wordless = _wordless(_row(snap, ui, data, ranks, None)) if tall > 1 else BLANK
            sheet.add(*[wordless] * above, row, *[wordless] * (tall - 1 - above))
        legend = [*_cursor_lines(snap, ui, data, chosen, width), *_legend(data, ui, top, len(on_screen), len(items))]
        sheet.add(*([BLANK] if sheet.left > len(legend) else []), *legend)
        return sheet.done()


def _lines(height: int) -> int:
    """Return how many lines the map has on a screen without its panel."""
    return max(1, height - 3 - 5 - 2)


def _rows(n: int, ui: Ui, height: int) -> tuple[int, int]:
    """Return the ranks on the screen, and how many share a line."""
    lines = _lines(height)
    pair = 2 if ui.drawn and n > lines else 1
    return lines * pair, pair


def _row(snap: Snapshot, ui: Ui, data: HeatData, ranks: list[int], chosen: int | None) -> Line:
    """Return one line of the map: a rank, or two as the halves of a line."""
    mark = max((snap.summary.marks[snap.summary.layout.row_of[rank]] for rank in ranks), key=lambda m: m.level)
    here = chosen in ranks
    cursor = " cursor" if here else ""
    label = f"{ranks[0]:>5}  " if len(ranks) == 1 else fit(f"{ranks[0]:>3},{ranks[1]}", 7)
    # a row that was scrolled into view is read with the next snapshot
    blank: list[float | None] = [None] * data.cells
    values = [data.values.get(rank) or blank for rank in ranks]
    under = data.cell_of(ui.step) if here and ui.interactive else None
    parts: list[Part] = []
    for x, value in enumerate(values[0]):
        if ui.drawn:
            text, style = _cell([level(v[x], data.low, data.high) if x < len(v) else None for v in values], x == under)
        else:
            text = digit(value, data.low, data.high)
            style = _STYLES.get(text, "") + (" cursor" if x == under else "")
        parts.append((text, style.strip(), ""))
    made = [
        (f" {mark.glyph} ", f"{mark.style}{cursor}".strip(), ""),
        (label, f"{'bold' if mark.level > 1 else ''}{cursor}".strip(), ""),
        *merged(parts),
        _tail(snap, ranks[0], values[0]) if len(ranks) == 1 else ("", "", ""),
    ]
    return tuple((text, style, f"cell:{ranks[0]}") for text, style, _ in made if text)


def _wordless(row: Line) -> Line:
    """Return the map of one row, without what is at its left and right."""
    left = sum(cells(t) for t, _, _ in row[:2])
    return ((" " * left, "", row[0][2]), *row[2:-1])


def _tail(snap: Snapshot, rank: int, values: list[float | None]) -> Part:
    assert snap.frame is not None
    worst = snap.frame.table.numbers("slowest_in")[snap.summary.layout.row_of[rank]]
    if worst == worst:
        of = min(50, snap.summary.step or 50)
        return (f"  {int(worst)}/{of} slowest", "" if worst >= of / 2 else "muted", "")
    known = [v for v in values if v is not None]
    return (f"  mean {milliseconds(sum(known) / len(known) if known else None)}", "muted", "")


def _cursor_lines(snap: Snapshot, ui: Ui, data: HeatData, rank: int | None, width: int) -> list[Line]:
    """Return rank, step and phases under the cursor, and the finding that names the rank."""
    if rank is None or not ui.interactive:
        return []
    step, cell = data.newest if ui.step is None else ui.step, data.cell
    head = (f" ◆ rank {rank}  step {step}  ", "bold", "")
    if cell is None or cell.rank != rank or cell.step != step or cell.step_ms is None:
        made: Line = (head, ("not measured", "muted", ""))
    else:
        times = f"step {milliseconds(cell.step_ms)} ms  self {milliseconds(cell.self_ms)}  wait {milliseconds(cell.wait_ms)}  "
        room = width - len(head[0]) - len(times) - 2
        bar = bars.stacked(bars.phases_of(cell), cell.step_ms, room, colour=ui.drawn) if room >= 16 else []
        made = (head, (times, "", ""), *bar)
    # the worst finding is in the last line already
    named = next((f for f in snap.open_findings[1:] if rank in f.culprits), None)
    return [made, *(finding_lines(named, width, full=False) if named else [])]


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
    return ("▄", f"area-heat{lower}") if upper is None else ("▀", f"area-heat{upper} on-heat{lower}")


def _axis(data: HeatData, column: int | None) -> Line:
    text = ""
    for x in range(0, data.cells, 10):
        text = text.ljust(x)
        if len(text) == x:
            text += f"{data.first + x * data.per} "
    text = text.rstrip()
    if column is None:
        return line((" " * LABEL + text, "head"))
    text = text.ljust(column + 1)
    return line((" " * LABEL + text[:column], "head"), ("↓", "key"), (text[column + 1 :], "head"))


def _legend(data: HeatData, ui: Ui, top: int, shown: int, n: int) -> list[Line]:
    low, high = milliseconds(data.low), milliseconds(data.high)
    if ui.drawn:
        ramp = [(" ", f"on-heat{i}", "") for i in range(HEAT_LEVELS)]
        out = [line((f" scale  up to {low} ms ", "muted"), *ramp, (f" {high} ms and above   · not measured", "muted"))]
    else:
        first, second = (milliseconds(data.low + i * (data.high - data.low) / 8) for i in (1, 2))
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
