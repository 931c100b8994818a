"""The rank table grouped by node: one row per host, worst first."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.tui.data.order import ordered
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw.lines import Line, line, marked
from distdiag.tui.draw.severity import Mark
from distdiag.tui.draw.table import Column, choose, header, row
from distdiag.tui.draw.text import delta, gib, integer, median_low, milliseconds
from distdiag.tui.screens.ranks_columns import host_width, short_host
from distdiag.tui.ui import Ui


@dataclass(frozen=True)
class NodeGroup:
    """The ranks of one node."""

    node: int
    host: str
    ranks: int
    flagged: int
    worst: int  # rank with the worst mark, then the largest Δ self
    mark: Mark
    self_ms: float | None  # median
    delta_ms: float | None  # largest
    wait_ms: float | None
    data_ms: float | None
    memory_bytes: float | None  # largest
    step: float | None  # the last one's


def groups(snap: Snapshot, ui: Ui) -> list[NodeGroup]:
    """Return one entry per node with ranks that pass the filter; worst nodes first, then by node."""
    if snap.frame is None:
        return []
    table, marks = snap.frame.table, snap.summary.marks
    nodes, ranks, hosts = table.numbers("node"), table.numbers("rank"), table.words("host")
    columns = {
        c: table.numbers(c)
        for c in ("self_ms", "delta_self_ms", "wait_ms", "data_ms", "device_bytes", "rss_bytes", "step")
    }
    members: dict[int, list[int]] = {}
    plain = Ui(filter=ui.filter)
    for i in ordered(snap, plain):  # worst first within each node
        members.setdefault(int(nodes[i]) if nodes[i] == nodes[i] else 0, []).append(i)

    def known(column: str, rows: list[int]) -> list[float]:
        return [columns[column][i] for i in rows if columns[column][i] == columns[column][i]]

    out = []
    for node, rows in members.items():
        out.append(
            NodeGroup(
                node, hosts[rows[0]] or "", len(rows), sum(marks[i].level > 1 for i in rows), int(ranks[rows[0]]),
                max((marks[i] for i in rows), key=lambda m: m.level), median_low(known("self_ms", rows)),
                max(known("delta_self_ms", rows), default=None), median_low(known("wait_ms", rows)),
                median_low(known("data_ms", rows)),
                max(known("device_bytes", rows) or known("rss_bytes", rows), default=None),
                min(known("step", rows), default=None),
            )
        )  # fmt: skip
    out.sort(key=lambda g: (-g.mark.level, g.node), reverse=ui.reverse)
    return out


def _columns(snap: Snapshot) -> list[Column[NodeGroup]]:
    return [
        Column("node", "node", host_width(snap), "host", lambda g: short_host(g.host), "<"),
        Column("", "ranks", 6, "ranks on it", lambda g: str(g.ranks)),
        Column("", "finding", 7, "ranks with an open finding", lambda g: str(g.flagged) if g.flagged else "·"),
        Column("", "step", 7, "of the rank that is furthest behind", lambda g: integer(g.step)),
        Column("", "self ms", 8, "median of its ranks", lambda g: milliseconds(g.self_ms)),
        Column("", "max Δ", 7, "largest Δ self among its ranks", lambda g: delta(g.delta_ms)),
        Column("", "wait ms", 8, "median of its ranks", lambda g: milliseconds(g.wait_ms)),
        Column("", "data", 7, "median of its ranks", lambda g: milliseconds(g.data_ms), ">", 1),
        Column("", "mem GiB", 7, "largest of its ranks", lambda g: gib(g.memory_bytes), ">", 2),
        Column("", "worst", 6, "its worst rank", lambda g: str(g.worst), ">", 1),
        Column("", "state", 6, "worst severity", lambda g: (g.mark.word, g.mark.style), "<", 0),
    ]


def group_lines(snap: Snapshot, ui: Ui, width: int, room: int) -> tuple[list[Line], int, int | None]:
    """Return header and rows; how many rows fit; the cursor's line."""
    found = groups(snap, ui)
    chosen = choose(_columns(snap), width, lead=2)
    out = [header(chosen, 2)]
    fits = len(found) <= room - 1
    space = room - 1 if fits else max(1, room - 2)
    top, index = ui.window("ranks", [g.node for g in found], space)
    cursor = None
    for nth in range(top, min(len(found), top + space)):
        g = found[nth]
        text = row(chosen, g, ((f" {g.mark.glyph}", g.mark.style, f"node:{g.node}"),), hit=f"node:{g.node}")
        if nth == index:
            cursor = len(out)
            text = marked(text, width)
        out.append(text)
    if not fits:
        out.append(line((f"   nodes {top + 1:,}–{min(len(found), top + space):,} of {len(found):,}", "muted")))
    return out, space, cursor
