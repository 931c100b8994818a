"""The one widget: lines drawn through the line API, of which only those that changed are drawn again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Tooltip

from distdiag.tui.draw.lines import BLANK, STYLES, Line, hit_at, split_hit
from distdiag.tui.draw.palette import colours
from distdiag.tui.draw.picture import svg
from distdiag.tui.draw.text import cells


class Canvas(Widget, can_focus=True):
    """Shows lines; reports where it was clicked.

    A table widget renders every visible cell anew for one that changed, at seven to ten times the cost.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"canvas--{name}" for name in STYLES}
    DEFAULT_CSS = """
    Canvas {
        width: 1fr;
        height: 1fr;
        background: $background;
        color: $foreground;
    }
    Canvas > .canvas--muted { color: $foreground 72%; }
    Canvas > .canvas--bold { text-style: bold; }
    Canvas > .canvas--error { color: $text-error; text-style: bold; }
    Canvas > .canvas--warning { color: $text-warning; }
    Canvas:light > .canvas--warning { color: #7a4400; }
    Canvas > .canvas--title { color: $text-primary; text-style: bold; }
    Canvas > .canvas--head { color: $foreground 72%; text-style: underline; }
    Canvas > .canvas--key { color: $text-primary; text-style: bold; }
    Canvas > .canvas--cursor { background: $primary 20%; text-style: bold; }
    Canvas > .canvas--accent { color: $text-secondary; }
    Canvas > .canvas--data { color: $text-warning; }
    Canvas:light > .canvas--data { color: #7a4400; }
    Canvas > .canvas--forward { color: $text-secondary; }
    Canvas > .canvas--backward { color: $text-primary; }
    Canvas > .canvas--optimizer { color: $foreground; }
    Canvas > .canvas--other { color: $foreground 72%; }
    """

    @dataclass
    class Clicked(Message):
        """A click on a part that means something."""

        hit: str
        chain: int  # 2 for a double click
        x: int
        about: str  # what the part is

    class Resized(Message):
        """The canvas has a new size."""

    @dataclass
    class Wheel(Message):
        """The mouse wheel was turned."""

        by: int
        how: str  # `move` up and down, `pan` sideways or with shift, `zoom` with ctrl

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []
        self._strips: list[tuple[Line, Strip] | None] = []  # made from each line
        self._styles: dict[str, Style] = {}
        self._about: str | None = None  # what is under the mouse
        self._mouse = (-1, -1)
        self._rest: Timer | None = None

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(self._lines)

    def show(self, lines: list[Line]) -> int:
        """Show these lines from the top; returns how many had to be drawn again."""
        old = self._lines
        # an unchanged line stays the same object: its strip is found again
        now = self._lines = [old[y] if y < len(old) and old[y] == text else text for y, text in enumerate(lines)]
        width, both = self.size.width, min(len(old), len(now))
        changed = [y for y in range(max(len(old), len(now))) if y >= both or old[y] is not now[y]]
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))
        if self._about is not None:  # another page, or a scrolled list: the text under the mouse may have changed
            self._explain()
        return len(changed)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of a region.

        The base class adds borders, margins and tints to each line, which costs more than all that is drawn here; the
        canvas has none.
        """
        filters, background = self.get_line_filters(), self.background_colors[1]
        strips = []
        for y in crop.line_range:
            strip = self.render_line(y)
            for each in filters:
                strip = strip.apply_filter(each, background)
            strips.append(strip)
        return strips if crop.column_span == (0, self.size.width) else [s.crop(*crop.column_span) for s in strips]

    def render_line(self, y: int) -> Strip:
        """Return one line as a strip; the one made before if the line has not changed."""
        width = self.size.width
        text = self._lines[y] if y < len(self._lines) else BLANK
        self._strips += [None] * (y + 1 - len(self._strips))
        made = self._strips[y]
        if made is None or made[0] is not text or made[1].cell_length != width:
            made = self._strips[y] = (text, self._strip(text, width))
        return made[1]

    def _strip(self, text: Line, width: int) -> Strip:
        """Return a line in exactly `width` cells, neighbours of the same style in one segment."""
        base = self.style_of("")
        segments: list[Segment] = []
        used, before, run = 0, base, ""
        for words, names, _ in text:
            style = self._styles.get(names) or self.style_of(names)
            used += cells(words)
            if style is before:
                run += words
                continue
            if run:
                segments.append(Segment(run, before))
            before, run = style, words
        if used < width:
            if before is not base:
                segments.append(Segment(run, before))
                before, run = base, ""
            run += " " * (width - used)
        if run:
            segments.append(Segment(run, before))
        return Strip(segments, used).crop(0, width) if used > width else Strip(segments, width)

    def style_of(self, names: str) -> Style:
        """Return the colours of some styles: of the text, and the ground of an area or the cursor."""
        found = self._styles.get(names)
        if found is None:
            found = self.rich_style
            dark = self.app.current_theme.dark
            # an area keeps its colours under the cursor
            for name in sorted(names.split(), key=lambda n: colours(n, dark) is not None):
                area = colours(name, dark)
                if area is not None:
                    found = found + Style(color=area[0], bgcolor=area[1])
                    continue
                # the full style, not the partial one: only there a share of a colour is mixed with the ground
                style = self.get_component_rich_style(f"canvas--{name}")
                ground = style.bgcolor if name == "cursor" else found.bgcolor
                text = found.color if name in ("cursor", "bold") else style.color
                marks = Style(bold=style.bold or None, underline=style.underline or None)
                found = found + marks + Style(color=text, bgcolor=ground)
            self._styles[names] = found
        return found

    def picture(self, title: str) -> str:
        return svg(self._lines, self.style_of, self.size.width, title)

    def notify_style_update(self) -> None:
        """Use another theme: all styles are looked up again."""
        self._styles.clear()
        self._strips.clear()
        super().notify_style_update()

    def on_click(self, event: events.Click) -> None:
        action, about = self._under(event.x, event.y)
        if action or about:
            self.post_message(self.Clicked(action, event.chain, event.x, about))

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Explain what is under the mouse once the mouse rests."""
        self._mouse = (event.x, event.y)
        self._explain()
        if self._rest is not None:
            self._rest.stop()
        if self._about is not None:
            self._rest = self.set_timer(self.app.TOOLTIP_DELAY, self._show_tooltip)

    def _explain(self) -> None:
        about = self._under(*self._mouse)[1] or None
        if about != self._about:
            self._about = about
            self.tooltip = None if about is None else Text(about)

    def _show_tooltip(self) -> None:
        """Show the tooltip again: the library hides it when the mouse moves, and shows it only after a second move."""
        for tooltip in self.screen.query(Tooltip):
            if self._about is not None and not tooltip.display:
                tooltip.display = True
                self.tooltip = Text(self._about)  # the library puts its text next to the mouse

    def _under(self, x: int, y: int) -> tuple[str, str]:
        """Return what a click on a cell does, and what the cell is."""
        return split_hit(hit_at(self._lines[y], x) if 0 <= y < len(self._lines) else "")

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, 3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, -3)

    def on_mouse_scroll_left(self, event: events.MouseScrollLeft) -> None:
        self._wheel(event, -3, "pan")

    def on_mouse_scroll_right(self, event: events.MouseScrollRight) -> None:
        self._wheel(event, 3, "pan")

    def _wheel(self, event: events.MouseEvent, by: int, how: str = "") -> None:
        event.stop()
        how = how or ("zoom" if event.ctrl else "pan" if event.shift else "move")
        self.post_message(self.Wheel(by, how))

    def on_resize(self) -> None:
        self.post_message(self.Resized())
