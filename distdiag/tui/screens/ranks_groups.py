"""The rank table grouped by node: one row per host, worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distdiag.tui.data.order import ordered
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw.lines import Line
from distdiag.tui.draw.severity import Mark
from distdiag.tui.draw.table import Column, choose, header, row
from distdiag.tui.draw.text import delta, gib, integer, median_low, milliseconds
from distdiag.tui.screens.page import Sheet, lead
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
    values: dict[str, list[float]]  # by column: what is known of its ranks

    def median(self, column: str) -> float | None:
        return median_low(self.values[column])


_VALUES = ("self_ms", "delta_self_ms", "wait_ms", "data_ms", "device_bytes", "rss_bytes", "step")


def groups(snap: Snapshot, ui: Ui) -> list[NodeGroup]:
    """Return one entry per node with ranks that pass the filter; worst nodes first, then by node."""
    if snap.frame is None:
        return []
    table, marks = snap.frame.table, snap.summary.marks
    nodes, ranks, hosts = table.numbers("node"), table.numbers("rank"), table.words("host")
    members: dict[int, list[int]] = {}
    for i in ordered(snap, Ui(filter=ui.filter)):  # worst first within each node
        members.setdefault(int(nodes[i]) if nodes[i] == nodes[i] else 0, []).append(i)
    out = []
    for node, rows in members.items():
        values = {name: [v for v in map(table.numbers(name).__getitem__, rows) if v == v] for name in _VALUES}
        worst = max((marks[i] for i in rows), key=lambda m: m.level)
        flagged = sum(marks[i].level > 1 for i in rows)
        out.append(NodeGroup(node, hosts[rows[0]] or "", len(rows), flagged, int(ranks[rows[0]]), worst, values))
    out.sort(key=lambda g: (-g.mark.level, g.node), reverse=ui.reverse)
    return out


_C = Column[NodeGroup]
_COLUMNS = (
    _C("", "ranks", 6, "ranks on it", lambda g: str(g.ranks)),
    _C("", "finding", 7, "ranks with an open finding", lambda g: str(g.flagged) if g.flagged else "·"),
    _C("", "step", 7, "of the rank that is furthest behind", lambda g: integer(min(g.values["step"], default=None))),
    _C("", "self ms", 8, "median of its ranks", lambda g: milliseconds(g.median("self_ms"))),
    _C("", "max Δ", 7, "largest Δ self among its ranks", lambda g: delta(max(g.values["delta_self_ms"], default=None))),
    _C("", "wait ms", 8, "median of its ranks", lambda g: milliseconds(g.median("wait_ms"))),
    _C("", "data", 7, "median of its ranks", lambda g: milliseconds(g.median("data_ms")), ">", 1),
    _C("", "mem GiB", 7, "largest of its ranks", lambda g: gib(max(g.values["device_bytes"] or g.values["rss_bytes"], default=None)), ">", 2),
    _C("", "worst", 6, "its worst rank", lambda g: str(g.worst), ">", 1),
    _C("", "state", 6, "worst severity", lambda g: (g.mark.word, g.mark.style), "<", 0),
)  # fmt: skip


def list_groups(sheet: Sheet, snap: Snapshot, ui: Ui, room: int) -> None:
    """Write header and rows."""
    found = {g.node: g for g in groups(snap, ui)}
    host = _C("node", "node", host_width(snap), "host", lambda g: short_host(g.host), "<")
    chosen = choose([host, *_COLUMNS], sheet.width, lead=2)
    sheet.add(header(chosen, 2))

    def rows(nodes: Sequence[int]) -> Iterator[Line]:
        return (row(chosen, found[n], lead(found[n].mark, f"node:{n}"), hit=f"node:{n}") for n in nodes)

    space = room - 1 if len(found) <= room - 1 else room - 2
    sheet.list(ui, "ranks", list(found), space, rows, "   nodes")
