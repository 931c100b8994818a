"""Stacks: which line is every rank at? One tree for all ranks, so that the odd one out is seen."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from distdiag.diagnosis.model.findings import rank_list
from distdiag.store import stacks as store
from distdiag.store.frames import Frame
from distdiag.store.liveness import Monitor, number
from distdiag.store.reader import Run
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.draw import excerpt
from distdiag.tui.draw.lines import BLANK, Line, Screenful, fitted, line, marked
from distdiag.tui.draw.text import cells, clean, clip_left, clock, place, quote, seconds
from distdiag.tui.header import title_line
from distdiag.tui.panels import brief_panel
from distdiag.tui.screens.findings import source_blocks
from distdiag.tui.ui import Ui

MAX_SITES = 6
_LIBRARY = re.compile(r"(^|/)(torch|site-packages|dist-packages|lib/python[\d.]+)/|^<")  # not the job's own code


@dataclass(frozen=True)
class TreeLine:
    """One line of the tree: frames that all of `ranks` share."""

    depth: int
    frame: str
    ranks: tuple[int, ...]
    splits: bool  # the ranks of its parent part here
    first: bool  # the root
    leaf: bool


@dataclass(frozen=True)
class Site:
    """The innermost line of the job's own code that some ranks are at."""

    ranks: tuple[int, ...]
    function: str
    source: excerpt.Excerpt


@dataclass(frozen=True)
class StacksData:
    """The merged tree, from a dump, or of single lines where none was taken; and the source of where ranks are."""

    t_s: float | None = None
    lines: tuple[TreeLine, ...] = ()
    dumped: bool = False
    ranks: int = 0
    sites: tuple[Site, ...] = ()  # fewest ranks first


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> StacksData:
    """Return the newest dump in the run directory; without one, the site from each rank's page."""
    found = store.read(run.path)
    started = number(run.meta.get("started_unix_s"))
    if found is None:
        now = places(frame)
        tree = tuple(_flatten(store.merge(now), 0))
        return StacksData(frame.t_s, tree, False, len(frame.table), _sites(now, started, cache))
    key = ("stacks", found.t_s, len(found.ranks))
    if cache.get("stacks_key") != key:
        cache["stacks"] = tuple(_flatten(store.merge(found), 0))
        cache["stacks_key"] = key
    return StacksData(found.t_s, cache["stacks"], True, len(found.ranks), _sites(found, started, cache))


def _sites(found: store.Stacks, started_unix_s: float | None, cache: dict[Any, Any]) -> tuple[Site, ...]:
    """Return the lines that ranks are at, those of the fewest ranks first, with their source."""
    ranks: dict[tuple[str, str, int], list[int]] = {}
    for rank, each in found.ranks.items():
        own = (f for f in map(_parsed, reversed(each.stack)) if f is not None and not _LIBRARY.search(f[1]))
        if (site := next(own, None)) is not None:
            ranks.setdefault(site, []).append(int(rank))
    few = sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))[:MAX_SITES]
    sources = excerpt.cached([(file, line) for (_, file, line), _ in few], started_unix_s, cache)
    return tuple(Site(tuple(sorted(r)), site[0], s) for (site, r), s in zip(few, sources, strict=True))


def _parsed(frame: str) -> tuple[str, str, int] | None:
    """Return function, file and line of `function file:line`; None if it is not a frame."""
    function, _, at = frame.rpartition(" ")
    file, _, n = at.rpartition(":")
    return (function, file, int(n)) if function and file and re.fullmatch("[0-9]{1,9}", n) else None


def places(frame: Frame) -> store.Stacks:
    """Return every rank's innermost line as a stack of one frame."""
    t = frame.table
    out = {}
    columns = (
        t.numbers("rank"),
        t.words("file"),
        t.numbers("line"),
        t.words("function"),
        t.words("waiting_op"),
        t.numbers("waiting_seq"),
        t.words("life"),
    )
    for rank, file, n, function, op, seq, life in zip(*columns, strict=True):
        at = f"{function or '?'} {file}:{int(n)}" if file and n == n else None
        call = f"{op} #{int(seq)}" if op and seq == seq else op
        out[str(int(rank))] = store.RankStack(stack=(at,) if at else (), op=call, note=f"no place known ({life})")
    return store.Stacks(t_s=frame.t_s, ranks=out)


def _flatten(branches: list[store.Branch], depth: int, root: bool = True) -> list[TreeLine]:
    out: list[TreeLine] = []
    for b in branches:
        splits = len(branches) > 1
        out.append(TreeLine(depth, b.frame, tuple(b.ranks), splits, root, not b.children))
        # a chain stays at its depth; only where ranks part does the tree indent
        out += _flatten(b.children, depth + (1 if len(b.children) > 1 else 0), root=False)
    return out


class StacksPage:
    name = "stacks"
    title = "stacks"
    question = "which line is every rank at?"

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        return Request("stacks", ui.paused_at_s)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return range(len(snap.panel.lines)) if isinstance(snap.panel, StacksData) else []

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, StacksData) else StacksData()
        lines = [title_line(snap, ui, width, self.title, self.question), *_age(snap, data, ui, width), BLANK]
        tail = brief_panel(snap, ui, width, height)
        items = self.items(snap, ui)
        room = max(1, height - len(lines) - len(tail) - 1)
        top, index = ui.window("stacks", items, room)
        cursor = None
        total = data.ranks
        for nth in range(top, min(len(items), top + room)):
            text = _tree_line(data.lines[nth], total, width)
            if nth == index:
                cursor = len(lines)
                text = marked(text, width)
            lines.append(text)
        if len(items) > room:
            lines.append(line((f"   lines {top + 1:,}–{min(len(items), top + room):,} of {len(items):,}", "muted")))
        if not items:
            lines.append(line(("   no rank has shown a line of its code yet", "muted")))
        lines += _source_lines(data, width, height - len(lines) - len(tail))
        lines = [fitted(x, width) for x in lines[: height - len(tail)]]
        lines += [BLANK] * (height - len(lines) - len(tail))
        return Screenful([*lines, *tail][:height], room, cursor)


def _age(snap: Snapshot, data: StacksData, ui: Ui, width: int) -> list[Line]:
    if ui.busy:
        return [line((f" {clean(ui.busy)}", "accent"))]
    live = snap.monitor is Monitor.LIVE
    key = f"r takes new ones (distdiag dump {quote(snap.run)})" if live and ui.interactive else ""
    if not live and not data.dumped:
        key = "the run is over: no more can be taken"
    elif live and not ui.interactive:
        key = f"distdiag dump {quote(snap.run)} takes whole stacks"
    if data.dumped and data.t_s is not None:
        ago = (
            f", {seconds(snap.t_s - data.t_s)} before the moment shown"
            if snap.t_s is not None and snap.t_s >= data.t_s
            else ""
        )
        title = f" full stacks, taken at {clock(data.t_s)}{ago}   "
    else:
        title = " innermost lines only, from the rank pages; no full stacks were taken   "
    return [fitted(line(title, (key, "muted")), width)]


def _source_lines(data: StacksData, width: int, room: int) -> list[Line]:
    """Return the source around the lines that ranks are at; one reason if none can be read."""
    readable = [s for s in data.sites if s.source.lines] or data.sites[:1]
    blocks = []
    for s in readable:
        at = place(s.source.file, s.source.line, s.function)
        blocks.append((line("   ", (rank_list(s.ranks), "bold"), f": {at}"), s.source))
    return source_blocks(blocks, width, room)


def _tree_line(t: TreeLine, total: int, width: int) -> Line:
    """Return `ranks 0–2 (3 of 4)  main  train.py:91`: the ranks, then function and site."""
    parsed = _parsed(t.frame)
    indent = "   " + "  " * t.depth
    who, style = "", ""
    if t.splits or t.first:
        who = f"{rank_list(t.ranks)} ({len(t.ranks):,} of {total:,})  "
        style = "warning" if t.splits and len(t.ranks) * 4 <= total else "bold"
    room = width - cells(indent) - cells(who) - 2
    if parsed is None:
        return fitted(line(indent, (who, style), (clean(t.frame), "accent")), width)
    function, file, n = parsed
    name = clean(function)
    where = place(file, n)
    if room > cells(name) + cells(where) + 6:
        where = clip_left(f"{clean(file)}:{n}", room - cells(name) - 2)
    return fitted(line(indent, (who, style), name, "  ", (where, "" if t.leaf else "muted")), width)
