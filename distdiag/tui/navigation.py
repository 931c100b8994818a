"""What the keys do: choose the screen, the rank, the order of the rows and the moment shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from distdiag.store.liveness import Monitor
from distdiag.tui.data import filters
from distdiag.tui.data.heat_data import METRICS
from distdiag.tui.data.order import ORDERS
from distdiag.tui.draw.lines import explanations
from distdiag.tui.draw.text import clock
from distdiag.tui.files import Files
from distdiag.tui.screens.page import Pannable
from distdiag.tui.ui import Ui

if TYPE_CHECKING:
    from distdiag.tui.draw.canvas import Canvas
    from distdiag.tui.screens.page import Page


class Navigation(Files):
    """The part of the app that moves through the screens, the ranks and the run's time."""

    if TYPE_CHECKING:
        pages: dict[str, Page]
        canvas: Canvas

        def set_filter(self, text: str) -> bool: ...
        def action_leave(self, code: int = 0) -> None: ...
        def _close_filter(self, clear: bool) -> None: ...

    class Moved(Message):
        """The reader's thread found another moment."""

        def __init__(self, at_s: float | None) -> None:
            super().__init__()
            self.at_s = at_s

    @property
    def page(self):
        return self.pages[self.ui.page]

    # -- screens and rows ------------------------------------------------------------

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
            ui.explained, ui.explained_page = explanations(self.canvas.lines), ui.page
        ui.page = name
        self.redraw()

    def action_back(self) -> None:
        if self.ui.typing:
            return self._close_filter(clear=True)
        if self.ui.back:
            self.ui.page = self.ui.back.pop()
        elif self.ui.page != "ranks":
            self.ui.page = "ranks"
        elif self.ui.filter.text:
            self.ui.filter = filters.Filter("")
        self.redraw()

    def open_rank(self, rank: int) -> None:
        self.ui.rank = rank
        self.action_show("rank")

    def action_open(self) -> None:
        ui = self.ui
        items = self.page.items(self.snap, ui)
        if not items:
            return
        item = items[ui.index(ui.page, items)]
        if ui.page == "findings":
            found = next((f for f in self.snap.findings if f.key == item), None)
            who = (found.culprits or found.victims) if found else ()
            return self.open_rank(who[0]) if who else self.say("this finding names no single rank")
        if ui.page == "ranks" and ui.group:
            return self._open_node(item)
        if isinstance(item, tuple) and isinstance(item[0], int):
            item = item[0]
        if isinstance(item, int) and ui.page in ("ranks", "heat", "memory", "data", "timeline"):
            self.open_rank(item)

    def _open_node(self, node: object) -> None:
        self.ui.group = False
        self.set_filter(f"node:{node}")

    def action_neighbour(self, by: int) -> None:
        items = self.pages["ranks"].items(
            self.snap, Ui(sort=self.ui.sort, reverse=self.ui.reverse, filter=self.ui.filter)
        )
        ranks = [i for i in items if isinstance(i, int)]
        if self.ui.rank in ranks:
            self.ui.rank = ranks[(ranks.index(self.ui.rank) + by) % len(ranks)]
            self.redraw()

    def action_move(self, by: int) -> None:
        ui = self.ui
        ui.follow = False
        order = getattr(self.page, "order", None)
        if order is not None:
            order.moved()
        ui.move(ui.page, self.page.items(self.snap, ui), by)
        self.redraw()

    def action_page(self, way: int) -> None:
        self.action_move(way * max(1, self.ui.rows - 1))

    def action_ends(self, way: int) -> None:
        self.action_move(way * len(self.page.items(self.snap, self.ui)))

    def action_pan(self, by: int) -> None:
        if isinstance(self.page, Pannable):
            self.page.pan(self.snap, self.ui, by)
            self.redraw()

    def action_zoom(self, by: int) -> None:
        if isinstance(self.page, Pannable):
            self.page.zoom(self.snap, self.ui, by)
            self.redraw()

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
        self.redraw()

    def action_reverse(self) -> None:
        self.ui.reverse = not self.ui.reverse
        self.redraw()

    def action_group(self) -> None:
        self.ui.group = not self.ui.group
        self.ui.cursor.pop("ranks", None)
        self.redraw()

    def action_follow(self) -> None:
        self.ui.follow = not self.ui.follow
        self.say("the cursor follows the worst rank" if self.ui.follow else "the cursor stays where it is")

    def action_metric(self) -> None:
        metrics = list(METRICS)
        self.ui.metric = metrics[(metrics.index(self.ui.metric) + 1) % len(metrics)]
        self.redraw()

    # -- time travel --------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        if self.ui.paused_at_s is not None:
            self.ui.paused_at_s = None
        elif self.snap.monitor is Monitor.LIVE:
            self.ui.paused_at_s = self.snap.t_s
        else:
            return self.say("nothing more is written to this run: [ and ] replay it")
        self.redraw()

    def action_step(self, by: int) -> None:
        at = self.ui.paused_at_s if self.ui.paused_at_s is not None else self.snap.t_s
        if at is not None:
            self.source.step(at, by, self._found)

    def _found(self, at_s: float | None) -> None:
        """Move to the found time; called in the reader's thread."""
        self.post_message(self.Moved(at_s))

    def action_first_moment(self) -> None:
        self.action_step(-1_000_000)

    def action_travel(self) -> None:
        items = self.page.items(self.snap, self.ui)
        if self.ui.page != "findings" or not items:
            return
        key = items[self.ui.index("findings", items)]
        found = next(f for f in self.snap.findings if f.key == key)
        at = found.detected_s if found.detected_s is not None else found.first_seen_s
        if at is None:
            return self.say("it is not known when this was raised")
        self.ui.paused_at_s = at
        self.ui.page = "ranks"
        self.say(f"the run at {clock(at)}, when this was raised; space returns")

    def on_navigation_moved(self, message: Moved) -> None:
        if message.at_s is None:
            return
        end = self.snap.newest_t_s is not None and message.at_s >= self.snap.newest_t_s
        self.ui.paused_at_s = None if end and self.snap.monitor is not Monitor.LIVE else message.at_s
        self.redraw()
