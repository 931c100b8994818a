"""What all screens have in common: what to read, the items of the cursor, and a sheet of lines with a panel below."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from distdiag.tui.data.order import Cached
from distdiag.tui.data.snapshot import PageReader, Request, Snapshot
from distdiag.tui.draw.lines import BLANK, Line, Screenful, fitted, line, marked
from distdiag.tui.draw.severity import Mark
from distdiag.tui.panels import brief_panel, title_line
from distdiag.tui.ui import Ui

Read = TypeVar("Read")  # what a screen's reader reads
Item = TypeVar("Item", bound=Hashable)


class Page(Generic[Read]):
    """One screen: pure functions of a snapshot and what the person chose."""

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    # type of what is read; made without arguments, it is what is drawn before anything was read
    empty: ClassVar[type] = type(None)
    read: ClassVar[PageReader | None] = None  # reads what the screen needs beyond the frame, in the reader's thread

    def data(self, snap: Snapshot) -> Read:
        """Return what was read for this screen; an empty one if the snapshot was read for another."""
        return snap.panel if isinstance(snap.panel, self.empty) else self.empty()

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        """Return what to read for this screen at this size."""
        return Request(self.name, ui.paused_at_s)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        """Return the items that the cursor moves over; empty if it only scrolls or does nothing."""
        return ()

    def rank_of(self, snap: Snapshot, item: Any) -> int | None:
        """Return the rank that Enter opens on an item: by default the item, or what a pair begins with."""
        rank = item[0] if isinstance(item, tuple) else item
        return rank if isinstance(rank, int) else None

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        """Return the screen without its key bar, at most `height` lines."""
        raise NotImplementedError

    # what a screen with a time axis does; the others do nothing

    def pan(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Move by so many cells."""

    def zoom(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Zoom in, or out if negative."""

    def click(self, snap: Snapshot, ui: Ui, rank: int, x: int) -> None:
        """Handle a click at cell `x` of the line of a rank."""

    def sheet(self, snap: Snapshot, ui: Ui, width: int, height: int, right: str = "") -> Sheet:
        """Return a sheet with the head of a screen, and the worst findings below."""
        return Sheet(width, height, brief_panel(snap, ui, width, height), [self.head(snap, ui, width, right)])

    def head(self, snap: Snapshot, ui: Ui, width: int, right: str = "") -> Line:
        return title_line(snap, ui, width, self.title, self.question, right)


class RankedPage(Page[Read]):
    """A screen with a row for each rank, in the order that the person chose."""

    def __init__(self) -> None:
        self.order = Cached(time.monotonic)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return self.order.ranks(snap, ui)


class Sheet:
    """A screen that is written from the top, with a panel at its bottom."""

    def __init__(self, width: int, height: int, panel: Sequence[Line] = (), lines: Iterable[Line] = ()) -> None:
        self.width = width
        self.height = height
        self.panel = panel
        self.lines = list(lines)
        self.rows = 1
        self.cursor: int | None = None

    @property
    def left(self) -> int:
        """Lines between what is written and the panel."""
        return self.height - len(self.lines) - len(self.panel)

    def add(self, *lines: Line) -> None:
        self.lines += lines

    def note(self, text: str, style: str = "muted", hit: str = "") -> None:
        self.lines.append(line((text, style, hit)))

    def list(
        self, ui: Ui, page: str, items: Sequence[Item], room: int, draw: Callable[[Sequence[Item]], Iterable[Line]],
        rows: str = "   rows", of: str = "",
    ) -> tuple[int, int | None]:  # fmt: skip
        """Write the items that fit into `room` lines, the one at the cursor marked; below, which of how many they are.

        `rows` names the items, `of` what they are all of that pass. Returns the index of the one under the cursor.
        """
        room = max(1, room)
        top, index = ui.window(page, items, room)
        for nth, text in enumerate(draw(items[top : top + room]), top):
            if nth == index:
                self.cursor = len(self.lines)
                text = marked(text, self.width)
            self.lines.append(text)
        if len(items) > room:
            self.note(f"{rows} {top + 1:,}–{min(len(items), top + room):,} of {len(items):,}{of}")
        self.rows = room
        return top, index

    def done(self) -> Screenful:
        lines = [fitted(x, self.width) for x in self.lines[: max(0, self.height - len(self.panel))]]
        lines += [BLANK] * (self.height - len(lines) - len(self.panel))
        return Screenful([*lines, *self.panel][: self.height], self.rows, self.cursor)


def lead(mark: Mark, hit: str = "") -> Line:
    """Return the left of a row: the glyph of its severity."""
    return ((f" {mark.glyph}", mark.style, hit),)
