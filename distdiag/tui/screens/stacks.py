"""Stacks: which line is every rank at? One tree for all ranks, so that the odd one out is seen."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from distdiag.diagnosis.model.findings import rank_list
from distdiag.store.liveness import Monitor
from distdiag.terms.units import counted
from distdiag.tui.data import stacks_data
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.data.stacks_data import StacksData, TreeLine, parsed
from distdiag.tui.draw.lines import BLANK, Line, Screenful, fitted, line
from distdiag.tui.draw.text import cells, clean, clip_left, clock, place, quote, seconds
from distdiag.tui.screens.findings import source_blocks
from distdiag.tui.screens.page import Page
from distdiag.tui.ui import Ui


class StacksPage(Page[StacksData]):
    name = title = "stacks"
    question = "which line is every rank at?"
    empty = StacksData
    read = staticmethod(stacks_data.read)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return range(len(self.data(snap).lines))

    def rank_of(self, snap: Snapshot, item: int) -> int | None:
        return self.data(snap).lines[item].ranks[0]

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = self.data(snap)
        sheet = self.sheet(snap, ui, width, height)
        sheet.add(_age(snap, data, ui), BLANK)
        items = self.items(snap, ui)
        tree = lambda some: (_tree_line(data.lines[nth], data.ranks, width) for nth in some)  # noqa: E731
        sheet.list(ui, "stacks", items, sheet.left - 1, tree, "   lines")
        if not items:
            sheet.note("   no rank has shown a line of its code yet")
        sheet.add(*_source_lines(data, width, sheet.left))
        return sheet.done()


def _age(snap: Snapshot, data: StacksData, ui: Ui) -> Line:
    if ui.busy:
        return line((f" {clean(ui.busy)}", "accent"))
    live = snap.monitor is Monitor.LIVE
    key = "r takes new ones" if live and ui.interactive else ""
    if not live and not data.dumped:
        key = "the run is over: no more can be taken"
    elif live and not ui.interactive:
        key = f"distdiag dump {quote(snap.run)} takes whole stacks"
    if data.dumped and data.t_s is not None:
        age_s = -1.0 if snap.t_s is None else snap.t_s - data.t_s
        ago = f", {seconds(age_s)} before the moment shown" if age_s >= 0 else ""
        title = f" full stacks of {clock(data.t_s)}{ago}   "
    else:
        title = " innermost lines only, from the rank pages; no full stacks were taken   "
    return line(title, (key, "muted"))


def _source_lines(data: StacksData, width: int, room: int) -> list[Line]:
    """Return the source around the lines that ranks are at; one reason if none can be read."""
    readable = [s for s in data.sites if s.source.lines] or data.sites[:1]
    at = [place(s.source.file, s.source.line, s.function) for s in readable]
    titles = [line("   ", (rank_list(s.ranks), "bold"), f": {x}") for s, x in zip(readable, at, strict=True)]
    return source_blocks([(title, s.source) for title, s in zip(titles, readable, strict=True)], width, room)


def _tree_line(t: TreeLine, total: int, width: int) -> Line:
    """Return `ranks 0–2 (3 of 4 ranks)  main  train.py:91`: the ranks, then function and site."""
    frame = parsed(t.frame)
    indent = "   " + "  " * t.depth
    who, style = "", ""
    if t.splits or t.first:
        who = f"{rank_list(t.ranks)} ({len(t.ranks):,} of {counted(total, 'rank')})  "
        style = "warning" if t.splits and len(t.ranks) * 4 <= total else "bold"
    room = width - cells(indent) - cells(who) - 2
    if frame is None:
        return fitted(line(indent, (who, style), (clean(t.frame), "accent")), width)
    function, file, n = frame
    name = clean(function)
    where = place(file, n)
    if room > cells(name) + cells(where) + 6:
        where = clip_left(f"{clean(file)}:{n}", room - cells(name) - 2)
    return fitted(line(indent, (who, style), name, "  ", (where, "" if t.leaf else "muted")), width)
