"""Ranks, the home screen: who is slow, and what does it cost?"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from typing import Any

from distdiag.tui.data import history, ranks_data
from distdiag.tui.data.order import BY_KEY
from distdiag.tui.data.ranks_data import Capacity, RanksData
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import JobState, job_state
from distdiag.tui.draw import bars, severity
from distdiag.tui.draw.charts import MIN_HEIGHT as CHART_HEIGHT
from distdiag.tui.draw.lines import BLANK, Line, Part, Screenful, fitted, line, width_of
from distdiag.tui.draw.severity import OK, Mark
from distdiag.tui.draw.table import choose, header, row
from distdiag.tui.draw.text import MISSING, cells, clean, milliseconds, percent, size
from distdiag.tui.panels import footer_panel, state_line, step_line
from distdiag.tui.screens import comm, history_charts
from distdiag.tui.screens.page import RankedPage, Sheet, lead
from distdiag.tui.screens.ranks_columns import Shown, columns_for, groups, list_groups
from distdiag.tui.ui import Ui

MIN_ROWS = 6
PANEL_WIDTH, PANEL_HEIGHT = 90, 40  # smaller screens have no collectives
CHART_LINES = 45
CHARTS_FROM = 28  # lines of a screen that has charts however many ranks there are
COLLECTIVES_FROM = 2 * CHART_HEIGHT + 8  # free lines


class RanksPage(RankedPage[RanksData]):
    name = title = "ranks"
    question = "who is slow, and what does it cost?"
    empty = RanksData
    read = staticmethod(ranks_data.read)

    def __init__(self) -> None:
        super().__init__()
        self._charts: tuple[object, list[Line]] = (None, [])

    def charts(self, points: tuple[history.Point, ...], now: float, paused: bool, *how: Any) -> list[Line]:
        """Return the charts; drawn again every second, and in a replay at every new time."""
        key = (points[-1:] if paused else bool(points), int(now), paused, how)
        if self._charts[0] != key:
            self._charts = (key, history_charts.chart_lines(points, now, *how))
        return self._charts[1]

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        items = () if ui.group else self.order.ranks(snap, ui)
        top, _ = ui.window("ranks", items, height)
        shown = tuple(items[top : top + height])
        # a table of many ranks leaves no line for the collectives: they are not read then
        room = height >= PANEL_HEIGHT and height - min(len(items), height) >= COLLECTIVES_FROM
        return Request("ranks", ui.paused_at_s, None, shown, extra=width >= PANEL_WIDTH and room)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return [g.node for g in groups(snap, ui)] if ui.group else self.order.ranks(snap, ui)

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        job = job_state(snap)
        steps_ms = [point.step_ms for point in self.data(snap).points]
        top = [state_line(snap, job, width), step_line(snap, job, width, steps_ms)]
        if snap.frame is None:
            sheet = Sheet(width, height, footer_panel(snap, ui, job, width, max(4, height // 2)), top)
            if snap.problem is None:
                sheet.add(BLANK)
                sheet.note("   Nothing to show yet: rows appear when the first rank has attached to the recorder.")
                sheet.note("   Was the job started with `DISTDIAG=1`, or does it call distdiag.attach()?")
            return sheet.done()
        # a third of the screen for findings, at least enough for one
        panel = max(5, min(height // 3, 16)) if height >= 15 else max(2, height // 4)
        sheet = Sheet(width, height, footer_panel(snap, ui, job, width, panel), top)
        sheet.add(_spread_line(snap, ui, job, width))
        sheet.add(*map_lines(snap, width, sheet.left - MIN_ROWS - 2))
        room = sheet.left
        if height >= CHARTS_FROM and self.data(snap).points:
            # with many ranks the charts shrink first, to one row of the lowest ones
            room = max(min(room, MIN_ROWS), room - CHART_HEIGHT - 1)
        if ui.group:
            list_groups(sheet, snap, ui, max(1, room))
        else:
            self._table(sheet, snap, ui, job, max(1, room))
        self._extra(sheet, snap, ui)
        return sheet.done()

    def _table(self, sheet: Sheet, snap: Snapshot, ui: Ui, job: JobState, room: int) -> None:
        """Write header, rows and the line about rows that do not fit."""
        assert snap.frame is not None
        table, end = snap.frame.table, len(sheet.lines) + room
        items, row_of = self.order.ranks(snap, ui), snap.summary.layout.row_of
        chosen = choose(columns_for(snap, ui, job.stuck, sheet.width), sheet.width, lead=2)
        sheet.add(header(chosen, 2, ui.sort, ui.reverse))
        if not items:
            words = clean(ui.filter.text)
            return sheet.note(f"   no rank passes the filter `{words}`: / changes it" if words else "   no rank yet")
        if ui.follow and ui.interactive:
            ui.cursor["ranks"], ui.top["ranks"] = items[0], 0
        capacity, scale = self.data(snap).capacity, max(table.known("step_ms"), default=0.0)

        def rows(ranks: Sequence[int]) -> Iterator[Line]:
            indices = [row_of[rank] for rank in ranks]
            for i, rank in zip(indices, table.rows(indices), strict=True):
                item = Shown(
                    rank, snap.summary.marks[i], snap, ui, job.stuck, capacity.get(rank.rank, Capacity()), scale
                )
                hit = f"row:{rank.rank}"
                yield row(chosen, item, lead(item.mark, hit), severity.stale(rank), hit)

        fits = len(items) <= room - 1
        of = f" that pass (of {len(table):,})" if len(items) < len(table) else ""
        sheet.list(ui, "ranks", items, room - 1 if fits else room - 2, rows, of=of)
        if fits and of:
            sheet.note(f"   {len(items):,} of {len(table):,} ranks pass the filter")
        if len(sheet.lines) < end - 1 and any(c.parts and c.head and not c.head(w) for c, w in chosen):
            made = tuple(bars.legend(sheet.width - 4, colour=ui.drawn))
            sheet.add(BLANK, ((" " * (sheet.width - width_of(made) - 1), "", ""), *made))

    def _extra(self, sheet: Sheet, snap: Snapshot, ui: Ui) -> None:
        """Write charts of the job and its collectives, if the table leaves lines free."""
        assert snap.frame is not None
        data, width, left = self.data(snap), sheet.width, sheet.left
        if left < CHART_HEIGHT + 1:
            return
        collectives: list[Line] = []
        if data.comm is not None and width >= PANEL_WIDTH and left >= COLLECTIVES_FROM:
            collectives = comm.summary_lines(data.comm, width, 5, ui)
        room = left - 1 - (len(collectives) + 1 if collectives else 0)
        how = (width - 1, min(room, CHART_LINES), snap.finding_marks, ui.ascii)
        for block in (self.charts(data.points, snap.frame.t_s, ui.paused_at_s is not None, *how), collectives):
            sheet.add(*([BLANK, *block] if block else []))


def _spread_line(snap: Snapshot, ui: Ui, job: JobState, width: int) -> Line:
    s = snap.summary
    order = BY_KEY[ui.sort].title + (" reversed" if ui.reverse else "") if ui.sort in BY_KEY else ui.sort
    right = f"sort: {order}"
    if ui.filter.text:
        right = f"filter: {clean(ui.filter.text)}   {right}"
    if job.stuck or (job.word == "FAILED" and s.waiting):
        if s.waiting:
            (op, group, seq, nbytes), n = s.waiting[0]
            what = clean(op) + (f" #{seq}" if seq is not None else "")
            detail = ", ".join(x for x in (clean(group), size(nbytes) if nbytes is not None else "") if x)
            others = sum(n for _, n in s.waiting[1:])
            more = f"; {others:,} in others" if others else ""
            left = f" waiting  {n:,} of {s.n:,} ranks, in {what}{f' ({detail})' if detail else ''}{more}"
        else:
            left = " waiting  no rank waits in a collective"
    elif s.self_p50 is None:
        left = " self ms  – (no step has ended yet)"
    else:
        p99 = f"  p99 {milliseconds(s.self_p99)}" if s.self_p99 is not None else ""
        spread = MISSING if s.spread is None else percent(100 * s.spread) if s.spread < 10 else f"{1 + s.spread:,.0f}×"
        left = f" self ms  p50 {milliseconds(s.self_p50)}{p99}  max {milliseconds(s.self_max)}   spread {spread}"
    gap = width - cells(left) - cells(right) - 1
    if gap < 3:
        return fitted(line(left, f"   {right}") if ui.filter.text else line(left), width)
    return line(left, "   ", (right, "muted"))


FROM_RANKS = 65  # fewer ranks are all in the table
MAX_LINES = 20
NOBODY = Mark(0, " ", " ", "", "", "no rank at this place")


def map_lines(snap: Snapshot, width: int, room: int) -> list[Line]:
    """Return one glyph per rank (column = node, row = local rank) if that fits in `room` lines, else one per node.

    A node's glyph is that of its worst rank. Nothing where even that does not fit: the table is worth more.
    """
    if snap.frame is None or snap.summary.n < FROM_RANKS or room < 1:
        return []
    layout, marks = snap.summary.layout, snap.summary.marks
    columns, locals_ = len(layout.nodes), len(layout.locals)
    if columns < 2:
        return []
    if columns <= width - 10 and locals_ <= min(room, MAX_LINES):
        rows: list[dict[int, Mark]] = [{} for _ in layout.locals]
        for i in snap.summary.flagged:
            column, row = layout.place[i]
            rows[row][column] = marks[i]
        if len(layout.place) < columns * locals_:  # the last node may have fewer ranks
            for column, row in {*product(range(columns), range(locals_))} - {*layout.place}:
                rows[row][column] = NOBODY
        labels = [f" gpu {x:<4}"[:9] for x in layout.locals]
        return [_row(label, flagged, range(columns), layout.nodes) for label, flagged in zip(labels, rows, strict=True)]
    worst: dict[int, Mark] = {}
    for i in snap.summary.flagged:
        column = layout.place[i][0]
        if column not in worst or marks[i].level > worst[column].level:
            worst[column] = marks[i]
    per_line = (width - 10) // 64 * 64 if width >= 74 else width - 10
    starts = range(0, columns, per_line)
    if len(starts) > min(room, MAX_LINES):
        return []
    return [_row(f" n{layout.nodes[a]:<7}", worst, range(a, min(columns, a + per_line)), layout.nodes) for a in starts]


def _row(label: str, flagged: dict[int, Mark], columns: range, nodes: Sequence[int]) -> Line:
    """Return one line of the map: healthy ranks merged, each rank with a finding separate, to be clicked."""
    parts: list[Part] = [(label, "muted", "")]
    at = columns.start
    for column in sorted(c for c in flagged if c in columns):
        if column > at:
            parts.append((OK.glyph * (column - at), OK.style, ""))
        mark = flagged[column]
        parts.append((mark.glyph, mark.style, f"node:{nodes[column]}" if mark.level > 0 else ""))
        at = column + 1
    if at < columns.stop:
        parts.append((OK.glyph * (columns.stop - at), OK.style, ""))
    return tuple(parts)
