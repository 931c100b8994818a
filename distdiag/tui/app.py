"""The terminal app: keys and clicks change what the person chose, snapshots change what is known, both redraw."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.command import Hit, Hits, Provider
from textual.events import Key
from textual.screen import Screen
from textual.widgets import Input

from distdiag.tui.data import filters
from distdiag.tui.data.order import ORDERS
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.source import Source
from distdiag.tui.draw.canvas import Canvas
from distdiag.tui.draw.lines import BLANK, Line, ascii_line, fitted, line
from distdiag.tui.draw.text import clean, clip, wrap
from distdiag.tui.files import Files
from distdiag.tui.keys import KEYS, applies, key_bar, works_on
from distdiag.tui.navigation import Navigation
from distdiag.tui.screens import pages, readers
from distdiag.tui.screens.page import Page
from distdiag.tui.ui import Ui

MIN_WIDTH, MIN_HEIGHT = 60, 16
ANSWER_LINES = 3
MOVES = ("move", "page", "ends", "pan", "zoom", "step", "open", "back", "neighbour", "command_palette")  # as keys only
LATE_S = 0.08  # a screen whose data have not come by then is drawn without them


class RankCommands(Provider):
    """`12`, `rank 12`: opens that rank."""

    async def search(self, query: str) -> Hits:
        m = re.fullmatch(r"\s*(?:go\s*to\s*)?(?:rank\s*)?(\d+)\s*", query, re.IGNORECASE)
        navigation = getattr(self.app, "navigation", None)
        if m is None or navigation is None:
            return
        rank = int(m[1])
        if rank < navigation.app.snap.summary.n:
            yield Hit(1.0, f"Go to rank {rank}", partial(navigation.open_rank, rank), help="open the rank's own screen")


class DistdiagApp(App[None]):
    """A view of one run, read-only."""

    TITLE = "distdiag"
    COMMANDS = App.COMMANDS | {RankCommands}
    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        *(Binding(k.keys, k.action, k.help, show=False) for k in KEYS if k.label != "Resume"),
        Binding("ctrl+c", "leave(130)", "leave", show=False, priority=True),
    ]
    CSS = """
    Screen { layers: base over; }
    Tooltip { padding: 0 1; max-width: 60; }
    #filter { dock: bottom; height: 1; border: none; padding: 0 1; display: none; background: $panel; }
    #filter.open { display: block; }
    """

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
        self.source = Source(run_dir, self._deliver, readers(), hz=hz, follow_attempts=follow_attempts)
        self.return_value_code = 0
        self.drawn = 0  # lines drawn so far; what the benchmark looks at
        self._newest: Snapshot | None = None
        self._pending = False
        self._wanted_theme = theme
        self.canvas = Canvas()
        self.navigation, self.files = Navigation(self), Files(self)
        for part in (self.navigation, self.files):  # the library looks for the actions of keys here
            for name in dir(part):
                if name.startswith("action_"):
                    setattr(self, name, getattr(part, name))

    @property
    def page(self) -> Page:
        return self.pages[self.ui.page]

    def compose(self) -> ComposeResult:
        yield self.canvas
        yield Input(
            placeholder="node084   rank 600-700   sev>=warn   wait>10      Enter keeps, Esc clears",
            id="filter",
            compact=True,
        )

    def on_mount(self) -> None:
        # several terminals set COLORFGBG as `foreground;background`; 7 and 15 are light
        light = os.environ.get("COLORFGBG", "").rsplit(";", 1)[-1] in ("7", "15")
        theme = self._wanted_theme or os.environ.get("TEXTUAL_THEME")
        theme = theme or ("textual-light" if light else "textual-dark")
        if theme in self.available_themes:
            self.theme = theme
        self.canvas.focus()
        self.source.start()

    def on_unmount(self) -> None:
        self.source.stop()

    def action_leave(self, code: int = 0) -> None:
        self.return_value_code = code
        self.source.stop()
        self.exit()

    def _deliver(self, snapshot: Snapshot) -> None:
        """Keep the newest snapshot and wake the screen once; called in the reader's thread."""
        self._newest = snapshot
        if not self._pending:
            self._pending = True
            self.call_later(self._show_newest)

    def _show_newest(self) -> None:
        self._pending = False
        if self._newest is not None:
            self.snap = self._newest
            self.redraw()

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
        if late or self._answers(request):
            self._draw(width, height)
        else:
            self.set_timer(LATE_S, self._draw_late)

    def _answers(self, request: Request) -> bool:
        """True if the newest snapshot was read for this page, row and moment."""
        have = self.snap.request
        if self.snap.problem is not None or self.snap.frame is None:
            return True

        def of(r: Request) -> tuple[object, ...]:
            return (r.page, r.rank, r.gpu, r.at_s, r.metric, r.places)

        return of(have) == of(request)

    def _draw_late(self) -> None:
        if not self._answers(self.source.wanted):
            self.redraw(late=True)

    def _draw(self, width: int, height: int) -> None:
        full = self.page.render(self.snap, self.ui, width, height - 1)
        self.ui.rows = full.rows
        lines: list[Line] = [fitted(x, width) for x in full.lines[: height - 1]]
        lines += [BLANK] * (height - 1 - len(lines))
        lines = self._with_last_lines(lines, width)
        if self.ui.ascii:
            lines = [ascii_line(x) for x in lines]
        self.drawn += self.canvas.show(lines)

    def _with_last_lines(self, lines: list[Line], width: int) -> list[Line]:
        """Add the key bar, or the answer to a key or click, which covers up to three lines."""
        message = self.ui.message or self.ui.busy
        if not message:
            return [*lines, key_bar(self.snap, self.ui, width)]
        answer = [line((f" {row}", "accent")) for row in wrap(clean(message), width - 2, ANSWER_LINES)]
        return [*lines[: len(lines) + 1 - len(answer)], *answer]

    def on_canvas_resized(self) -> None:
        self.redraw()

    def say(self, text: str) -> None:
        """Answer a key in the last line; the next key clears it."""
        self.ui.message = text
        self.redraw()

    def on_key(self, event: Key) -> None:
        self.ui.message = ""
        elsewhere = [k for k in KEYS if event.key in k.keys.split(",") and not works_on(k, self.ui.page)]
        if elsewhere and not self.ui.typing:
            event.prevent_default()
            self.say(f"{elsewhere[0].shown} ({elsewhere[0].help}) works on: {', '.join(elsewhere[0].pages)}")

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
            self.close_filter(clear=False)

    def close_filter(self, clear: bool) -> None:
        """Close the filter line; `clear` lets all ranks through."""
        self.ui.typing = False
        self.query_one("#filter", Input).remove_class("open")
        self.canvas.focus()
        if clear:
            self.ui.filter = filters.Filter("")
        self.redraw()

    def on_canvas_wheel(self, message: Canvas.Wheel) -> None:
        if message.how == "zoom":
            self.navigation.action_zoom(-1 if message.by > 0 else 1)
        elif message.how == "pan":
            self.navigation.action_pan(message.by)
        else:
            self.navigation.action_move(message.by)

    async def on_canvas_clicked(self, message: Canvas.Clicked) -> None:
        kind, _, value = message.hit.partition(":")
        ui = self.ui
        ui.message = ""
        if kind == "do":
            await self.run_action(value)
        elif kind == "sort" and value:
            self.navigation.sort_by(value)
        elif kind == "row" and value.isdigit():
            self.navigation.click_rank(int(value), message.chain)
        elif kind == "cell" and value.isdigit():
            self.page.click(self.snap, ui, int(value), message.x)
            self.redraw()
        elif kind == "node":
            self.navigation.open_node(value)
        elif kind == "finding":
            ui.cursor["findings"] = value
            self.navigation.action_show("findings")
        elif kind == "item" and value.isdigit():
            items = self.page.items(self.snap, ui)
            if int(value) < len(items):
                ui.cursor[ui.page] = items[int(value)]
                self.redraw()
        if message.about:
            self.say(message.about)

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        """Yield what the keys do here by name, and further commands."""
        go = self.navigation
        for key in KEYS:
            if key.action.partition("(")[0] not in MOVES and applies(key, self.snap, self.ui):
                name = f"Screen: {key.label}" if key.action.startswith("show(") else key.help.capitalize()
                yield SystemCommand(name, f"{key.help} ({key.shown})", partial(self.run_action, key.action))
        for order in ORDERS:
            yield SystemCommand(f"Sort by {order.title}", "order of the rank table", partial(go.sort_by, order.key))
        for text, meaning in (
            ("sev>=warn", "only ranks with a finding"),
            ("life:running", "only running ranks"),
            ("", "all ranks"),
        ):
            yield SystemCommand(f"Filter: {text or 'off'}", meaning, partial(self.set_filter, text))
        yield SystemCommand("Go to the first moment", "replay from the beginning", partial(go.action_step, -1_000_000))
        yield SystemCommand("Go to rank …", "type the number of the rank instead", self.action_command_palette)
        yield SystemCommand("Theme", "colours, light and dark", self.action_change_theme)
