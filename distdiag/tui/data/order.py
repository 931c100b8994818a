"""Which ranks a table shows, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from distdiag.store.frames import Frame
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw import severity
from distdiag.tui.ui import Ui


@dataclass(frozen=True)
class Order:
    """One order of the ranks: name in the header, column, and whether large comes first."""

    key: str
    title: str
    column: str
    descending: bool = True


ORDERS = (
    Order("severity", "severity, Δ self", ""),
    Order("rank", "rank", "rank", descending=False),
    Order("self_ms", "self ms", "self_ms"),
    Order("delta", "Δ self", "delta_self_ms"),
    Order("wait_ms", "wait ms, least first", "wait_ms", descending=False),
    Order("data_ms", "data", "data_ms"),
    Order("step", "step, last first", "step", descending=False),
    Order("memory", "memory", "device_bytes"),
    Order("waiting", "time in phase", "waiting_age_s"),
    Order("cpu", "CPU", "cpu_pct"),
    Order("node", "node", "node", descending=False),
)
BY_KEY = {o.key: o for o in ORDERS}


def ordered(snap: Snapshot, ui: Ui) -> list[int]:
    """Return the rows of the frame that pass the filter, in the chosen order.

    By default worse first; among the flagged the blamed first, then the larger Δ self, all others by rank, so that healthy rows keep
    their places while their numbers flicker.
    """
    if snap.frame is None:
        return []
    table, marks = snap.frame.table, snap.summary.marks
    rows = ui.filter.indices(table, marks)
    order = BY_KEY.get(ui.sort, ORDERS[0])
    if order.key == "severity":
        delta = table.numbers("delta_self_ms")
        some = set(rows) if ui.filter.tests else None
        flagged = [i for i in snap.summary.flagged if some is None or i in some]
        blamed = [0 if s is None else -severity.of_finding(s).level for s in table.words("severity")]
        # all ranks of a job that failed are lost: first the one that is to blame for it
        flagged.sort(key=lambda i: (-marks[i].level, blamed[i], -delta[i] if delta[i] == delta[i] else 0.0, i))
        quiet = rows
        if flagged:
            named = set(flagged)
            quiet = [i for i in rows if i not in named]
        return [*quiet[::-1], *flagged[::-1]] if ui.reverse else [*flagged, *quiet]
    values = table.numbers(order.column)
    if order.column == "device_bytes" and not any(v == v for v in values):
        values = table.numbers("rss_bytes")
    elif order.column == "waiting_age_s":
        phase = table.numbers("phase_age_s")
        values = [w if w == w else p for w, p in zip(values, phase, strict=True)]
    known = [i for i in rows if values[i] == values[i]]
    known.sort(key=values.__getitem__, reverse=order.descending != ui.reverse)
    return known + [i for i in rows if values[i] != values[i]]  # what was not measured comes last either way


class Cached:
    """Keeps the last order: recomputed when the data or the choice changed, but not within two seconds of the person
    moving the cursor, so that rows do not jump away under it."""

    HOLD_S = 2.0

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._frame: Frame | None = None
        self._choice: tuple[object, ...] = ()
        self._ranks: list[int] = []
        self._moved_at = -math.inf

    def moved(self) -> None:
        self._moved_at = self._now()

    def ranks(self, snap: Snapshot, ui: Ui) -> list[int]:
        """Return the ranks in the order to show now."""
        choice = (ui.sort, ui.reverse, ui.filter.text)
        before, frame = self._frame, snap.frame
        if choice == self._choice:
            held = self._now() - self._moved_at < self.HOLD_S and not ui.filter.tests
            if frame is before or (held and frame and before and len(frame.table) == len(before.table)):
                return self._ranks
        ranks = snap.summary.layout.ranks
        self._ranks, self._frame, self._choice = [ranks[i] for i in ordered(snap, ui)], frame, choice
        return self._ranks
