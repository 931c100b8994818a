"""The map of many ranks: a bad node is a vertical stripe, a bad slot a horizontal one."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.tui.lines import Line, Part
from distdiag.tui.severity import Mark
from distdiag.tui.snapshot import Snapshot

FROM_RANKS = 65  # fewer ranks are all in the table
MAX_LINES = 20


def map_lines(snap: Snapshot, width: int, room: int) -> list[Line]:
    """One glyph per rank (column = node, row = local rank) where that fits in `room` lines, else one per node.

    A node's glyph is that of its worst rank. Nothing where even that does not fit: the table is worth more.
    """
    if snap.frame is None or snap.summary.n < FROM_RANKS or room < 1:
        return []
    table, marks = snap.frame.table, snap.summary.marks
    nodes: dict[int, dict[int, Mark]] = {}
    for node, local, mark in zip(table.numbers("node"), table.numbers("local_rank"), marks, strict=True):
        nodes.setdefault(int(node) if node == node else 0, {})[int(local) if local == local else 0] = mark
    columns = sorted(nodes)
    locals_ = sorted({x for n in nodes.values() for x in n})
    if len(columns) <= width - 10 and len(locals_) <= min(room, MAX_LINES) and len(columns) > 1:
        return [_row(f" gpu {x:<4}"[:9], [(nodes[c].get(x), c) for c in columns]) for x in locals_]
    worst = [(max(nodes[c].values(), key=lambda m: m.level), c) for c in columns]
    per_line = max(10, (width - 10) // 64 * 64 if width >= 74 else width - 10)
    lines = [_row(f" n{columns[i]:<7}", worst[i : i + per_line]) for i in range(0, len(worst), per_line)]
    if len(columns) == 1 or len(lines) > min(room, MAX_LINES):
        return []
    return lines


def _row(label: str, cells: Sequence[tuple[Mark | None, int]]) -> Line:
    """One line of the map; neighbours alike share a part, flagged nodes can be clicked."""
    parts: list[Part] = [(label, "muted", "")]
    for mark, node in cells:
        glyph, style = (mark.glyph, mark.style) if mark is not None else (" ", "")
        hit = f"node:{node}" if mark is not None and mark.level > 0 else ""
        if parts[-1][1] == style and not hit and not parts[-1][2] and len(parts) > 1:
            parts[-1] = (parts[-1][0] + glyph, style, "")
        else:
            parts.append((glyph, style, hit))
    return tuple(parts)
