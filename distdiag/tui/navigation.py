"""What the keys do: choose the screen, the rank, the order of the rows and the moment shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from distdiag.store.liveness import Monitor
from distdiag.tui.data import filters
from distdiag.tui.data.heat_data import METRICS
from distdiag.tui.data.order import ORDERS
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.data.source import Source
from distdiag.tui.draw.canvas import Canvas
from distdiag.tui.draw.lines import explanations
from distdiag.tui.draw.text import clock
from distdiag.tui.screens.page import Page, RankedPage
from distdiag.tui.ui import Ui


class Viewer(Protocol):
    """What the parts of the app need of it: what is known and chosen, and how to show it."""

    snap: Snapshot
    ui: Ui
    source: Source
    canvas: Canvas
    pages: dict[str, Page]

    @property
    def page(self) -> Page: ...
    def redraw(self, late: bool = False) -> None: ...
    def say(self, text: str) -> None: ...
    def set_filter(self, text: str) -> bool: ...
    def close_filter(self, clear: bool) -> None: ...
    def run_worker(self, work: Any, *, exclusive: bool) -> Any: ...
    def call_later(self, callback: Any, *args: Any) -> bool: ...


class Navigation:
    """Moves through the screens, the ranks and the run's time; each `action_NAME` is what a key does."""

    def __init__(self, app: Viewer) -> None:
        self.app = app

    @property
    def ui(self) -> Ui:
        return self.app.ui

    @property
    def page(self) -> Page:
        return self.app.page

    def action_show(self, name: str) -> None:
        ui = self.ui
        ui.message = ""
        if name in ("rank", "help") and ui.page not in ("rank", "help"):
            ui.back.append(ui.page)
        elif name not in ("rank", "help"):
            ui.back.clear()
        if name == "help" and ui.page == "help":
            return self.action_back()
        if name == "help":
            ui.explained, ui.explained_page = explanations(self.app.canvas.lines), ui.page
        ui.page = name
        self.app.redraw()

    def action_back(self) -> None:
        if self.ui.typing:
            return self.app.close_filter(clear=True)
        if self.ui.back:
            self.ui.page = self.ui.back.pop()
        elif self.ui.page != "ranks":
            self.ui.page = "ranks"
        elif self.ui.filter.text:
            self.ui.filter = filters.Filter("")
        self.app.redraw()

    def open_rank(self, rank: int) -> None:
        self.ui.rank = rank
        self.action_show("rank")

    def action_open(self) -> None:
        ui = self.ui
        items = self.page.items(self.app.snap, ui)
        if not items:
            return
        item = items[ui.index(ui.page, items)]
        if ui.page == "ranks" and ui.group:
            return self.open_node(item)
        rank = self.page.rank_of(self.app.snap, item)
        return self.app.say("no rank is under the cursor") if rank is None else self.open_rank(rank)

    def open_node(self, node: object) -> None:
        self.ui.group = False
        self.app.set_filter(f"node:{node}")

    def action_neighbour(self, by: int) -> None:
        every = self.app.pages["ranks"].items(self.app.snap, replace(self.ui, group=False))
        ranks = [rank for rank in every if isinstance(rank, int)]
        if self.ui.rank in ranks:
            self.ui.rank = ranks[(ranks.index(self.ui.rank) + by) % len(ranks)]
            self.app.redraw()

    def action_move(self, by: int) -> None:
        ui = self.ui
        ui.follow = False
        if isinstance(self.page, RankedPage):
            self.page.order.moved()
        ui.move(ui.page, self.page.items(self.app.snap, ui), by)
        self.app.redraw()

    def action_page(self, way: int) -> None:
        self.action_move(way * max(1, self.ui.rows - 1))

    def action_ends(self, way: int) -> None:
        self.action_move(way * len(self.page.items(self.app.snap, self.ui)))

    def action_pan(self, by: int) -> None:
        self.page.pan(self.app.snap, self.ui, by)
        self.app.redraw()

    def action_zoom(self, by: int) -> None:
        self.page.zoom(self.app.snap, self.ui, by)
        self.app.redraw()

    def action_sort(self) -> None:
        keys = [o.key for o in ORDERS]
        at = keys.index(self.ui.sort) if self.ui.sort in keys else -1
        self.sort_by(keys[(at + 1) % len(keys)])

    def sort_by(self, key: str) -> None:
        """Sort the tables by a column; the same again reverses."""
        if key == self.ui.sort:
            self.ui.reverse = not self.ui.reverse
        elif key in {o.key for o in ORDERS}:
            self.ui.sort, self.ui.reverse = key, False
        self.app.redraw()

    def action_reverse(self) -> None:
        self.ui.reverse = not self.ui.reverse
        self.app.redraw()

    def action_group(self) -> None:
        self.ui.group = not self.ui.group
        self.ui.cursor.pop("ranks", None)
        self.app.redraw()

    def action_follow(self) -> None:
        self.ui.follow = not self.ui.follow
        self.app.say("the cursor follows the worst rank" if self.ui.follow else "the cursor stays where it is")

    def action_metric(self) -> None:
        metrics = list(METRICS)
        self.ui.metric = metrics[(metrics.index(self.ui.metric) + 1) % len(metrics)]
        self.app.redraw()

    def action_pause(self) -> None:
        if self.ui.paused_at_s is not None:
            self.ui.paused_at_s = None
        elif self.app.snap.monitor is Monitor.LIVE:
            self.ui.paused_at_s = self.app.snap.t_s
        else:
            return self.app.say("nothing more is written to this run: [ and ] replay it")
        self.app.redraw()

    def action_step(self, by: int) -> None:
        at = self.ui.paused_at_s if self.ui.paused_at_s is not None else self.app.snap.t_s
        if at is not None:
            self.app.source.step(at, by, lambda found_s: self.app.call_later(self._moved, found_s))

    def action_travel(self) -> None:
        items = self.page.items(self.app.snap, self.ui)
        if self.ui.page != "findings" or not items:
            return
        key = items[self.ui.index("findings", items)]
        found = next(f for f in self.app.snap.findings if f.key == key)
        at = found.detected_s if found.detected_s is not None else found.first_seen_s
        if at is None:
            return self.app.say("it is not known when this was raised")
        self.ui.paused_at_s = at
        self.ui.page = "ranks"
        self.app.say(f"the run at {clock(at)}, when this was raised; space returns")

    def _moved(self, at_s: float | None) -> None:
        """Show the time that the reader's thread found; None if there is none."""
        if at_s is None:
            return
        end = self.app.snap.newest_t_s is not None and at_s >= self.app.snap.newest_t_s
        self.ui.paused_at_s = None if end and self.app.snap.monitor is not Monitor.LIVE else at_s
        self.app.redraw()

    def click_rank(self, rank: int, chain: int) -> None:
        """Put the cursor on a rank's row; a double click, or one more, opens the rank."""
        for item in self.page.items(self.app.snap, self.ui):
            if item == rank or (isinstance(item, tuple) and item[0] == rank):
                again = self.ui.cursor.get(self.ui.page) == item
                self.ui.cursor[self.ui.page] = item
                if chain >= 2 or again:
                    return self.open_rank(rank)
                break
        self.app.redraw()
