"""The terminal app: keys and clicks change what the person chose, snapshots change what is known, both redraw."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input

from distdiag.store.liveness import Monitor
from distdiag.tui.commands import RankCommands, system_commands
from distdiag.tui.data import filters
from distdiag.tui.data.order import ORDERS
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.source import Source
from distdiag.tui.draw.canvas import Canvas
from distdiag.tui.draw.lines import BLANK, Line, ascii_line, fitted, line
from distdiag.tui.draw.text import clean, clip, clock
from distdiag.tui.files import Files
from distdiag.tui.keys import KEYS, key_bar
from distdiag.tui.screens import Pannable, pages
from distdiag.tui.ui import METRICS, Ui

MIN_WIDTH, MIN_HEIGHT = 60, 16
LATE_S = 0.08  # a screen whose data have not come by then is drawn without them


class DistdiagApp(Files):
    """A view of one run, read-only."""

    TITLE = "distdiag"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS = App.COMMANDS | {RankCommands}
    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        *(
            Binding(k.keys, k.action, k.help, show=False, id=k.id)
            for k in KEYS
            if k.label != "Resume" and k.keys != "q"
        ),
        Binding("q", "leave(0)", "leave", show=False, id="quit"),
        Binding("ctrl+c", "leave(130)", "leave", show=False, priority=True, id="interrupt"),
    ]
    CSS = """
    Screen { layers: base over; }
    #filter { dock: bottom; height: 1; border: none; padding: 0 1; display: none; background: $panel; }
    #filter.open { display: block; }
    """

    class Ready(Message):
        """The reader's thread has a new snapshot."""

    class Moved(Message):
        """The reader's thread found another moment."""

        def __init__(self, at_s: float | None) -> None:
            super().__init__()
            self.at_s = at_s

    def __init__(
        self,
        run_dir: Path,
        ui: Ui | None = None,
        *,
        hz: float = 2.0,
        theme: str | None = None,
        follow_attempts: bool = True,
    ) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.ui = ui or Ui()
        self.ui.colour = not os.environ.get("NO_COLOR")
        self.snap = Snapshot(run_dir)
        self.pages = pages()
        self.source = Source(run_dir, self._deliver, hz=hz, follow_attempts=follow_attempts)
        self.return_value_code = 0
        self.drawn = 0  # lines drawn so far; what the benchmark looks at
        self._newest: Snapshot | None = None
        self._pending = False
        self._wanted_theme = theme
        self.canvas = Canvas()

    # -- life ---------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield self.canvas
        yield Input(
            placeholder="node084   rank 600-700   sev>=warn   wait>10      Enter keeps, Esc clears",
            id="filter",
            compact=True,
        )

    def on_mount(self) -> None:
        theme = (
            self._wanted_theme
            or os.environ.get("TEXTUAL_THEME")
            or ("textual-light" if _light_terminal() else "textual-dark")
        )
        if theme in self.available_themes:
            self.theme = theme
        self.canvas.focus()
        self.source.start()

    def on_unmount(self) -> None:
        self.source.stop()

    def action_leave(self, code: int = 0) -> None:
        """Leave; the job is not affected."""
        self.return_value_code = code
        self.source.stop()
        self.exit()

    # -- snapshots ----------------------------------------------------------------------------------------------

    def _deliver(self, snapshot: Snapshot) -> None:
        """From the reader's thread: keep the newest, and wake the screen once."""
        self._newest = snapshot
        if not self._pending:
            self._pending = True
            self.post_message(self.Ready())

    def on_distdiag_app_ready(self) -> None:
        self._pending = False
        if self._newest is not None:
            self.snap = self._newest
            self.redraw()

    def on_distdiag_app_moved(self, message: Moved) -> None:
        if message.at_s is None:
            return
        end = self.snap.newest_t_s is not None and message.at_s >= self.snap.newest_t_s
        self.ui.paused_at_s = None if end and self.snap.monitor is not Monitor.LIVE else message.at_s
        self.redraw()

    # -- drawing ------------------------------------------------------------------------------------------------

    @property
    def page(self):
        return self.pages[self.ui.page]

    def redraw(self, late: bool = False) -> None:
        """Draw the page from the newest snapshot, and ask for what it lacks."""
        width, height = self.canvas.size
        if not width or not height:
            return
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            text = f"distdiag needs {MIN_WIDTH}x{MIN_HEIGHT}; this is {width}x{height}"
            self.drawn += self.canvas.show([line(clip(text, width)), line((clip("q leaves", width), "muted"))])
            return
        page = self.page
        request = page.request(self.snap, self.ui, width, height - 1)
        self.source.want(request)
        if not late and not self._answers(request):
            self.set_timer(LATE_S, self._draw_late)
            return
        self._draw(width, height)

    def _answers(self, request: Request) -> bool:
        """Whether the snapshot at hand was read for this page, rank and moment."""
        have = self.snap.request
        if self.snap.problem is not None or self.snap.frame is None:
            return True
        return (have.page, have.rank, have.at_s, have.metric, have.place) == (
            request.page,
            request.rank,
            request.at_s,
            request.metric,
            request.place,
        )

    def _draw_late(self) -> None:
        width, height = self.canvas.size
        if (
            width >= MIN_WIDTH
            and height >= MIN_HEIGHT
            and not self._answers(self.page.request(self.snap, self.ui, width, height - 1))
        ):
            self._draw(width, height)

    def _draw(self, width: int, height: int) -> None:
        full = self.page.render(self.snap, self.ui, width, height - 1)
        self.ui.rows = full.rows
        lines: list[Line] = [fitted(x, width) for x in full.lines[: height - 1]]
        lines += [BLANK] * (height - 1 - len(lines))
        message = self.ui.message or self.ui.busy
        lines.append(
            line((f" {clip(clean(message), width - 2)}", "accent")) if message else key_bar(self.snap, self.ui, width)
        )
        if self.ui.ascii:
            lines = [ascii_line(x) for x in lines]
        self.drawn += self.canvas.show(lines)

    def on_canvas_resized(self) -> None:
        self.redraw()

    def say(self, text: str) -> None:
        """Answer a key in the last line; the next key clears it."""
        self.ui.message = text
        self.redraw()

    # -- keys ---------------------------------------------------------------------------------------------------

    def on_key(self) -> None:
        self.ui.message = ""

    def action_show(self, name: str) -> None:
        ui = self.ui
        ui.message = ""
        if name in ("rank", "help") and ui.page not in ("rank", "help"):
            ui.back.append(ui.page)
        elif name not in ("rank", "help"):
            ui.back.clear()
        if name == "help" and ui.page == "help":
            return self.action_back()
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
        for name in ("order",):
            order = getattr(self.page, name, None)
            if order is not None:
                order.moved()
        ui.move(ui.page, self.page.items(self.snap, ui), by)
        self.redraw()

    def action_page(self, way: int) -> None:
        self.action_move(way * max(1, self.ui.rows - 1))

    def action_ends(self, way: int) -> None:
        self.action_move(way * len(self.page.items(self.snap, self.ui)))

    def on_canvas_wheel(self, message: Canvas.Wheel) -> None:
        if message.how == "zoom":
            self.action_zoom(-1 if message.by > 0 else 1)
        elif message.how == "pan":
            self.action_pan(message.by)
        else:
            self.action_move(message.by)

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
        """Order the tables by a column; the same again reverses."""
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
        self.ui.metric = METRICS[(METRICS.index(self.ui.metric) + 1) % len(METRICS)]
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
        """From the reader's thread."""
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

    # -- filter -------------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        self.ui.typing = True
        box = self.query_one("#filter", Input)
        box.value = self.ui.filter.text
        box.add_class("open")
        box.focus()

    def set_filter(self, text: str) -> bool:
        """Apply a filter; a word that says nothing is answered and changes nothing."""
        try:
            self.ui.filter = filters.parse(text)
        except filters.BadFilter as e:
            self.say(str(e))
            return False
        self.ui.message = ""
        self.redraw()
        return True

    def on_input_changed(self, event: Input.Changed) -> None:
        if self.ui.typing:
            self.set_filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self.set_filter(event.value):
            self._close_filter(clear=False)

    def _close_filter(self, clear: bool) -> None:
        self.ui.typing = False
        self.query_one("#filter", Input).remove_class("open")
        self.canvas.focus()
        if clear:
            self.ui.filter = filters.Filter("")
        self.redraw()

    # -- clicks -------------------------------------------------------------------------------------------------

    async def on_canvas_clicked(self, message: Canvas.Clicked) -> None:
        kind, _, value = message.hit.partition(":")
        ui = self.ui
        ui.message = ""
        if kind == "do":
            await self.run_action(value)
        elif kind == "sort" and value:
            self.sort_by(value)
        elif kind == "row" and value.isdigit():
            self._click_rank(int(value), message.chain)
        elif kind == "cell" and value.isdigit() and isinstance(self.page, Pannable):
            self.page.click(self.snap, ui, int(value), message.x)
            self.redraw()
        elif kind == "node":
            self._open_node(value)
        elif kind == "finding":
            ui.cursor["findings"] = value
            self.action_show("findings")
        elif kind == "item" and value.isdigit():
            items = self.page.items(self.snap, ui)
            if int(value) < len(items):
                ui.cursor[ui.page] = items[int(value)]
                self.redraw()

    def _click_rank(self, rank: int, chain: int) -> None:
        items = self.page.items(self.snap, self.ui)
        for item in items:
            if item == rank or (isinstance(item, tuple) and item[0] == rank):
                again = self.ui.cursor.get(self.ui.page) == item
                self.ui.cursor[self.ui.page] = item
                if chain >= 2 or again:
                    return self.open_rank(rank)
                break
        self.redraw()

    # -- palette ------------------------------------------------------------------------------------------------

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        return system_commands(self)


def _light_terminal() -> bool:
    """COLORFGBG, which several terminals set as `foreground;background`: 7 and 15 are light backgrounds."""
    return os.environ.get("COLORFGBG", "").rsplit(";", 1)[-1] in ("7", "15")
