"""The map of many ranks: a bad node is a vertical stripe, a bad slot a horizontal one."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.data.summary import Layout
from distdiag.tui.draw.lines import Line, Part
from distdiag.tui.draw.severity import OK, Mark

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
        for row, column in _holes(layout):
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


def _holes(layout: Layout) -> list[tuple[int, int]]:
    """Places of the map where no rank is: the last node may have fewer."""
    if len(layout.place) == len(layout.nodes) * len(layout.locals):
        return []
    there = set(layout.place)
    return [(y, x) for x in range(len(layout.nodes)) for y in range(len(layout.locals)) if (x, y) not in there]


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
