"""Ranks, the home screen: who is slow, and what does it cost?"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.tui.data import history
from distdiag.tui.data.order import BY_KEY, Cached
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import JobState
from distdiag.tui.draw import bars, severity
from distdiag.tui.draw.charts import MIN_HEIGHT as CHART_HEIGHT
from distdiag.tui.draw.lines import BLANK, Line, Screenful, fitted, line, marked, width_of
from distdiag.tui.draw.rankmap import map_lines
from distdiag.tui.draw.table import choose, header, row
from distdiag.tui.draw.text import cells, clean, milliseconds, percent, size
from distdiag.tui.header import head
from distdiag.tui.panels import footer_panel
from distdiag.tui.screens import comm
from distdiag.tui.screens.ranks_columns import NOTHING, Capacity, Shown, columns_for
from distdiag.tui.screens.ranks_groups import group_lines, groups
from distdiag.tui.ui import Ui

MIN_ROWS = 6
PANEL_WIDTH, PANEL_HEIGHT = 90, 40  # smaller screens have no collectives
CHART_LINES = 45
CHARTS_FROM = 28  # lines of a screen that has charts however many ranks there are
GPU_AGE_S = 10.0  # an older sample of a GPU or a host is not shown
COLLECTIVES_EVERY_S = 2.0  # how often they are read
COLLECTIVES_FROM = 2 * CHART_HEIGHT + 8  # free lines


@dataclass(frozen=True)
class RanksData:
    """What the home screen shows beyond the frame."""

    comm: comm.CommData | None = None
    points: tuple[history.Point, ...] = ()
    capacity: dict[int, Capacity] = field(default_factory=dict)  # by rank, of the ranks on the screen


def read(run: Run, request: Request, frame: Frame, cache: dict) -> RanksData:
    """Read charts of the job, bars of the ranks on the screen, and collectives if they fit."""
    return RanksData(
        comm.read(run, request, frame, cache, COLLECTIVES_EVERY_S) if request.extra else None,
        history.read(run, frame, cache),
        _capacity(run, request, frame, cache),
    )


def _capacity(run: Run, request: Request, frame: Frame, cache: dict) -> dict[int, Capacity]:
    """Return GPU and host of each rank on the screen, from the newest samples at that time."""
    until, table = frame.t_s + 1.0, frame.table
    ranks, nodes, devices = table.numbers("rank"), table.numbers("node"), table.numbers("gpu")
    wanted = set(request.ranks)
    rows = [i for i, rank in enumerate(ranks) if rank in wanted]
    on = sorted({int(nodes[i]) for i in rows if nodes[i] == nodes[i]})
    newest = run.query(
        "SELECT (SELECT max(t_s) FROM gpu WHERE t_s <= ?1), (SELECT max(t_s) FROM host WHERE t_s <= ?1)", (until,)
    )[0]
    key = (newest, on, int(frame.t_s / GPU_AGE_S))
    if cache.get("capacity_key") != key:  # sampled less often than frames are written
        which = f"WHERE t_s > ? AND t_s <= ? AND node IN ({','.join('?' * len(on))}) GROUP BY node"
        gpu_age_s = GPU_AGE_S if len(table) <= 64 else 2.0
        gpus = run.query(
            f"SELECT max(t_s), node, gpu, utilization_pct, memory_total_bytes FROM gpu {which}, gpu",
            (until - 1.0 - gpu_age_s, until, *on),
        )
        hosts = run.query(
            f"SELECT max(t_s), node, memory_total_bytes FROM host {which}", (until - 1.0 - GPU_AGE_S, until, *on)
        )
        cache["capacity"] = {r[1:3]: r[3:] for r in gpus}, {node: total for _, node, total in hosts}
        cache["capacity_key"] = key
    of_gpu, of_host = cache["capacity"]
    out = {}
    for i in rows:
        use, total = of_gpu.get((nodes[i], devices[i]), (None, None))
        out[int(ranks[i])] = Capacity(use, total, of_host.get(nodes[i]))
    return out


class RanksPage:
    name = "ranks"
    title = "ranks"
    question = "who is slow, and what does it cost?"

    def __init__(self) -> None:
        self.order = Cached(time.monotonic)
        self._charts: tuple[object, list[Line]] = (None, [])

    def charts(self, points: tuple[history.Point, ...], now: float, paused: bool, *how: Any) -> list[Line]:
        """Return the charts; drawn again every second, and in a replay at every new time."""
        key = (points[-1:] if paused else bool(points), int(now), paused, how)
        if self._charts[0] != key:
            self._charts = (key, history.chart_lines(points, now, *how))
        return self._charts[1]

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        items = () if ui.group else self.order.ranks(snap, ui)
        top, _ = ui.window("ranks", items, height)
        shown = tuple(items[top : top + height])
        # a table of many ranks leaves no line for the collectives: they are not read then
        room = height >= PANEL_HEIGHT and height - min(len(items), height) >= COLLECTIVES_FROM
        return Request("ranks", ui.paused_at_s, None, shown, extra=width >= PANEL_WIDTH and room)

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
        if height >= CHARTS_FROM and isinstance(snap.panel, RanksData) and snap.panel.points:
            # with many ranks the charts shrink first, to one row of the lowest ones
            room = max(min(room, MIN_ROWS), room - CHART_HEIGHT - 1)
        if ui.group:
            body, shown, cursor = group_lines(snap, ui, width, max(1, room))
        else:
            body, shown, cursor = _table(snap, ui, job, rows, self.order.ranks(snap, ui), width, max(1, room))
        at = None if cursor is None else len(lines) + cursor
        lines += body
        left = height - len(lines) - len(panel)
        lines += _extra(self, snap, ui, width, left)
        lines += [BLANK] * (height - len(lines) - len(panel))
        return Screenful([*lines, *panel][:height], shown, at)


def _panel_height(height: int) -> int:
    """Return the number of lines for findings: a third of the screen, at least enough for one."""
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
            others = sum(n for _, n in s.waiting[1:])
            more = f"; {others:,} in other collectives" if others else ""
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
    """Return header, rows and the line about rows that do not fit; the rows shown; the cursor's line."""
    assert snap.frame is not None
    table = snap.frame.table
    columns = columns_for(snap, ui, job.stuck, width)
    capacity = snap.panel.capacity if isinstance(snap.panel, RanksData) else {}
    scale = max(table.known("step_ms"), default=0.0)
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
    on_screen = rows[top : top + space]
    for nth, (i, rank) in enumerate(zip(on_screen, table.rows(on_screen), strict=True), top):
        cap = capacity.get(rank.rank, NOTHING)
        item = Shown(rank, snap.summary.marks[i], snap, ui, job.stuck, cap, scale)
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
    if len(out) < room - 1 and any(c.parts is not None and c.head is not None and not c.head(w) for c, w in chosen):
        made = bars.legend(width - 4, colour=ui.drawn)
        out += [BLANK, (((" " * (width - width_of(tuple(made)) - 1)), "", ""), *made)]
    return out, space, cursor


# -- what only large screens have ---------------------------------------------------------------------------------


def _extra(page: RanksPage, snap: Snapshot, ui: Ui, width: int, left: int) -> list[Line]:
    """Return charts of the job and its collectives, in the lines that the table leaves free."""
    assert snap.frame is not None
    data = snap.panel if isinstance(snap.panel, RanksData) else RanksData()
    if left < CHART_HEIGHT + 1:
        return []
    collectives: list[Line] = []
    if data.comm is not None and width >= PANEL_WIDTH and left >= COLLECTIVES_FROM:
        collectives = comm.summary_lines(data.comm, snap, width, 5, ui)
    room = left - 1 - (len(collectives) + 1 if collectives else 0)
    marks = tuple((f.first_seen_s, severity.of_finding(f.severity).style) for f in snap.findings if f.first_seen_s)
    charts = page.charts(
        data.points, snap.frame.t_s, ui.paused_at_s is not None, width - 1, min(room, CHART_LINES), marks, ui.ascii
    )
    out = [BLANK, *charts] if charts else []
    if collectives:
        out += [BLANK, *collectives]
    return out[:left]
