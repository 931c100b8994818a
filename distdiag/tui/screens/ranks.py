"""Ranks, the home screen: who is slow, and what does it cost?"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

from distdiag.store.frames import RankRow
from distdiag.store.reader import Frame, Run
from distdiag.tui import severity
from distdiag.tui.header import head
from distdiag.tui.lines import BLANK, Line, Screenful, fitted, line, marked, rule
from distdiag.tui.order import BY_KEY, Cached
from distdiag.tui.panels import footer_panel
from distdiag.tui.rankmap import map_lines
from distdiag.tui.screens import comm
from distdiag.tui.screens.ranks_columns import Shown, columns_for
from distdiag.tui.screens.ranks_groups import group_lines, groups
from distdiag.tui.snapshot import Request, Snapshot
from distdiag.tui.state import JobState
from distdiag.tui.table import choose, header, row
from distdiag.tui.text import cells, clean, decimal, fit, integer, milliseconds, percent, size
from distdiag.tui.ui import Ui

MIN_ROWS = 6
PANEL_WIDTH, PANEL_HEIGHT = 90, 40  # smaller screens have no bars and no collectives


def read(run: Run, request: Request, frame: Frame, cache: dict) -> comm.CommData | None:
    """Collectives of the last steps, where the screen has room for them."""
    return comm.read(run, request, frame, cache) if request.extra else None


class RanksPage:
    name = "ranks"
    title = "ranks"
    question = "who is slow, and what does it cost?"

    def __init__(self) -> None:
        self.order = Cached(time.monotonic)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        return Request("ranks", ui.paused_at_s, extra=width >= PANEL_WIDTH and height >= PANEL_HEIGHT)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        if ui.group:
            return [g.node for g in groups(snap, ui)]
        return self.order.ranks(snap, ui)

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        lines, job = head(snap, ui, width)
        if snap.frame is None:
            return _nothing_yet(snap, ui, job, lines, width, height)
        lines.append(_spread_line(snap, ui, job, width))
        rows = self.order.rows(snap, ui)
        panel = footer_panel(snap, ui, job, width, _panel_height(height))
        lines += map_lines(snap, width, height - len(lines) - len(panel) - MIN_ROWS - 2)
        room = height - len(lines) - len(panel)
        if ui.group:
            body, shown, cursor = group_lines(snap, ui, width, max(1, room))
        else:
            body, shown, cursor = _table(snap, ui, job, rows, self.order.ranks(snap, ui), width, max(1, room))
        at = None if cursor is None else len(lines) + cursor
        lines += body
        left = height - len(lines) - len(panel)
        if width >= PANEL_WIDTH and height >= PANEL_HEIGHT:
            lines += _extra(snap, ui, job, rows, width, left)
        lines += [BLANK] * (height - len(lines) - len(panel))
        return Screenful([*lines, *panel][:height], shown, at)


def _panel_height(height: int) -> int:
    """Lines for the findings: a third of the screen, at least enough for one."""
    return max(5, min(height // 3, 16)) if height >= 15 else max(2, height // 4)


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
            more = f"; {len(s.waiting) - 1} other" if len(s.waiting) > 1 else ""
            left = f" waiting  {n:,} of {s.n:,} ranks, in {what} ({detail}){more}"
        else:
            left = " waiting  no rank waits in a collective"
    elif s.self_p50 is None:
        left = " self ms  – (no step has ended yet)"
    else:
        p99 = f"  p99 {milliseconds(s.self_p99)}" if s.self_p99 is not None else ""
        spread = percent(100 * s.spread) if s.spread is not None else "–"
        left = f" self ms  p50 {milliseconds(s.self_p50)}{p99}  max {milliseconds(s.self_max)}   spread {spread}"
    gap = width - cells(left) - cells(right) - 1
    if gap < 3:
        return fitted(line(left, f"   {right}") if ui.filter.text else line(left), width)
    return line(left, "   ", (right, "muted"))


def _nothing_yet(snap: Snapshot, ui: Ui, job: JobState, lines: list[Line], width: int, height: int) -> Screenful:
    panel = footer_panel(snap, ui, job, width, max(4, height // 2))
    if snap.problem is None:
        lines += [
            BLANK,
            line(("   Nothing to show yet: rows appear when the first rank has attached to the recorder.", "muted")),
            line(("   Was the script started with `-m distdiag.run`, or does it call distdiag.attach()?", "muted")),
        ]
    lines = [fitted(x, width) for x in lines]
    lines += [BLANK] * (height - len(lines) - len(panel))
    return Screenful([*lines[: max(1, height - len(panel))], *panel][:height])


def _table(
    snap: Snapshot, ui: Ui, job: JobState, rows: list[int], items: list[int], width: int, room: int
) -> tuple[list[Line], int, int | None]:
    """Head, rows and the line that says how many are not on the screen; shown rows; line of the cursor."""
    assert snap.frame is not None
    table = snap.frame.table
    columns = columns_for(snap, ui, job.stuck)
    chosen = choose(columns, width, lead=2)
    out = [header(chosen, 2, ui.sort, ui.reverse)]
    if not rows:
        why = f"no rank passes the filter `{clean(ui.filter.text)}`: / changes it" if ui.filter.text else "no rank yet"
        return [*out, line((f"   {why}", "muted"))], 1, None
    fits = len(rows) <= room - 1
    space = room - 1 if fits else max(1, room - 2)
    top, index = ui.window("ranks", items, space)
    if ui.follow and ui.interactive:
        top, index = 0, 0
        ui.cursor["ranks"] = items[0]
        ui.top["ranks"] = 0
    cursor = None
    for nth in range(top, min(len(rows), top + space)):
        i = rows[nth]
        item = Shown(table.row(i), snap.summary.marks[i], snap, ui, job.stuck)
        mark = item.mark
        lead = ((f" {mark.glyph}", mark.style, f"row:{item.row.rank}"),)
        text = row(chosen, item, lead, severity.stale(item.row), f"row:{item.row.rank}")
        if nth == index:
            cursor = len(out)
            text = marked(text, width)
        out.append(text)
    if not fits:
        last = min(len(rows), top + space)
        of = f" of {len(rows):,}" + (f" that pass (of {len(table):,})" if len(rows) < len(table) else "")
        out.append(line((f"   rows {top + 1:,}–{last:,}{of}", "muted")))
    elif len(rows) < len(table):
        out.append(line((f"   {len(rows):,} of {len(table):,} ranks pass the filter", "muted")))
    return out, space, cursor


# -- what only large screens have ---------------------------------------------------------------------------------

PHASES = (
    ("d", "data_ms", "data"), ("h", "h2d_ms", "other"), ("f", "forward_ms", "forward"), ("b", "backward_ms", "backward"),
    ("o", "optimizer_ms", "optimizer"), ("x", "other_ms", "other"),
)  # fmt: skip


def _extra(snap: Snapshot, ui: Ui, job: JobState, rows: list[int], width: int, left: int) -> list[Line]:
    assert snap.frame is not None
    data = snap.panel if isinstance(snap.panel, comm.CommData) else None
    collectives = comm.summary_lines(data, snap, width, 5) if data is not None and left >= 6 else []
    out: list[Line] = []
    bars = min(len(rows), left - len(collectives) - 4, 16)
    if bars >= 2 and not job.stuck and snap.summary.step_ms:
        legend = "one step, by phase   d data  h to device  f forward  b backward  o optimizer  x other  · waiting for others "
        out += [BLANK, rule(width, legend)]
        table = snap.frame.table
        for i in sorted(rows[:bars]):
            out.append(_bar(table.row(i), snap.summary.marks[i], width, snap.summary.step_ms))
        if bars < len(rows):
            out.append(line((f"   {len(rows) - bars:,} more ranks", "muted")))
    if collectives:
        out += [BLANK, *collectives]
    return out[:left]


def _bar(r: RankRow, mark: severity.Mark, width: int, step_ms: float) -> Line:
    room = width - 24
    parts: list[tuple[str, str]] = [(f" {mark.glyph} ", mark.style), (fit(f"rank {r.rank}", 10), "")]
    scale = room / max(step_ms, r.step_ms or 0.0)
    used, exact, waited = 0, 0.0, r.wait_ms or 0.0
    apart = max(0.0, (r.step_ms or 0.0) - sum(getattr(r, column) or 0.0 for _, column, _ in PHASES))
    for letter, column, style in PHASES:
        value = getattr(r, column) or 0.0
        if column == "backward_ms":
            value = max(0.0, value - max(0.0, waited - apart))  # the waiting that no phase leaves out is in backward
        exact += value * scale
        n = max(0, min(room, round(exact)) - used)
        parts.append((letter * n, style))
        used += n
    n = max(0, min(room, round(exact + waited * scale)) - used)
    parts.append(("·" * n, "muted"))
    parts.append((f" {milliseconds(r.step_ms)} ms", ""))
    return line(*parts)


def describe(snap: Snapshot) -> str:
    """One line for a screen reader, or a log: state, step, the worst rank."""
    s = snap.summary
    return f"step {integer(s.step)}, {decimal(s.step_ms)} ms, {s.reported} of {s.n} ranks"
