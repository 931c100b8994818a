"""The screens, one file each: what to read for it, which items the cursor moves over, and its lines."""

from __future__ import annotations

from distdiag.tui.data.snapshot import PageReader
from distdiag.tui.screens.page import Page


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
    return {name: page.read for name, page in pages().items() if page.read is not None}
