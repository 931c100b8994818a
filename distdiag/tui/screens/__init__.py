"""The screens, one file each: what to read for it, which items the cursor moves over, and its lines."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from distdiag.tui.data.snapshot import PageReader, Request, Snapshot
from distdiag.tui.draw.lines import Screenful
from distdiag.tui.ui import Ui


class Page(Protocol):
    """One screen; pure functions of a snapshot and what the person chose."""

    name: str
    title: str
    question: str

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        """Return what to read for this screen at this size."""
        ...

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        """Return the items that the cursor moves over; empty if it only scrolls or does nothing."""
        ...

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        """Return the screen without its key bar, at most `height` lines."""
        ...


@runtime_checkable
class Pannable(Protocol):
    """A screen with a time axis."""

    def pan(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Move by so many cells."""
        ...

    def zoom(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Zoom in, or out if negative."""
        ...

    def click(self, snap: Snapshot, ui: Ui, rank: int, x: int) -> None:
        """Handle a click at cell `x` of the line of a rank."""
        ...


def pages() -> dict[str, Page]:
    """Return all screens by name, in the order of their keys."""
    from distdiag.tui.screens import comm, data, findings, heat, memory, probes, profile, rank, ranks, stacks, timeline
    from distdiag.tui.screens import help as help_screen

    every: list[Page] = [
        ranks.RanksPage(), comm.CommPage(), heat.HeatPage(), memory.MemoryPage(), findings.FindingsPage(), data.DataPage(),
        stacks.StacksPage(), probes.ProbesPage(), timeline.TimelinePage(), profile.ProfilePage(), rank.RankPage(), help_screen.HelpPage(),
    ]  # fmt: skip
    return {p.name: p for p in every}


def readers() -> dict[str, PageReader]:
    """Return what each screen reads beyond the frame."""
    from distdiag.tui.data import memory_data
    from distdiag.tui.screens import comm, data, findings, heat, probes, profile, rank, ranks, stacks, timeline

    return {
        "ranks": ranks.read, "comm": comm.read, "heat": heat.read, "memory": memory_data.read, "findings": findings.read,
        "data": data.read, "stacks": stacks.read, "probes": probes.read, "rank": rank.read, "timeline": timeline.read,
        "profile": profile.read,
    }  # fmt: skip
