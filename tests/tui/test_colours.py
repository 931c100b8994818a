"""Every screen in colour, as text with its styles, and the colours of each style in a dark and a light theme.

`UPDATE_GOLDEN=1 pytest tests/tui/test_colours.py` writes golden/colour.txt and golden/colours.txt. In the first one
`‹error bold›` begins a style that lasts up to the next `‹…›`; `‹/›` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest
from rich.style import Style

from distdiag.tui.app import DistdiagApp
from distdiag.tui.draw.lines import Line, width_of
from tests.tui.conftest import MakeRun
from tests.tui.drive import showing
from tests.tui.synthetic import Scenario
from tests.tui.test_golden import At, compare

pytestmark = pytest.mark.usefixtures("frozen")
SIZE = (100, 30)
# name: the run, and the keys that open the screen
SCREENS: dict[str, tuple[Scenario, tuple[str, ...]]] = {
    name: (Scenario(ranks=8, steps=60, frames=2), keys)
    for name, keys in {
        "ranks": ("1",), "grouped": ("g",), "comm": ("g", "2"), "heat": ("3",), "memory": ("4", "down", "down", "down"),
        "findings": ("5",), "data": ("6",), "stacks": ("7",), "probes": ("8",), "timeline": ("9",), "profile": ("0",),
        "rank": ("1", "enter"), "help": ("question_mark",),
    }.items()
}  # fmt: skip
SCREENS |= {
    f"stalled {name}": (Scenario(state="stalled", ranks=8, steps=60, frames=2), keys)
    for name, keys in {"comm": ("2",), "stacks": ("7",), "timeline": ("9",)}.items()
}
SCREENS |= {"many ranks": (Scenario(ranks=1024, steps=60, frames=2), ("1",))}


def tagged(text: Line) -> str:
    """Return the line with a tag wherever its style changes; spaces without background or underline have no style."""
    out, before = "", ""
    for part, style, _ in text:
        names = set(style.split())
        seen = part.strip() or any(n.startswith(("on-", "in-")) or n in ("cursor", "head") for n in names)
        style = " ".join(sorted(names)) if seen else ""
        if style != before:
            out += f"‹{style or '/'}›"
        out, before = out + part, style
    return (out + "‹/›" if before else out.removesuffix("‹/›")).rstrip()


def drawn(app: DistdiagApp) -> list[list[tuple[str, Style]]]:
    """Return what the terminal gets: characters with their styles, line by line."""
    strips = app.screen._compositor.render_strips()
    return [[(c, s.style or Style()) for s in strip for c in s.text] for strip in strips]


def style_text(style: Style) -> str:
    """Return a style as text: `#e69f00 on #121212 bold`."""

    def colour(c: object) -> str:
        get = getattr(c, "get_truecolor", None)
        return get().hex if get else "default"

    marks = [" bold"] * bool(style.bold) + [" underline"] * bool(style.underline)
    return f"{colour(style.color)} on {colour(style.bgcolor)}{''.join(marks)}"


Colours = dict[str, str]


async def _screens(runs: MakeRun, at: At) -> tuple[dict[str, list[Line]], Colours, Colours]:
    """Return all screens, and the colours of each style, in the terminal's theme and in a light one."""
    screens: dict[str, list[Line]] = {}
    dark: Colours = {}
    light: Colours = {}
    for scenario in dict.fromkeys(s for s, _ in SCREENS.values()):
        async with showing(at(runs(scenario)), SIZE, theme="textual-dark") as d:
            for name, (wanted, keys) in SCREENS.items():
                if wanted == scenario:
                    await d.press(*keys)
                    screens[name] = list(d.app.canvas.lines)
                    _add(dark, screens[name], drawn(d.app), name)
            d.app.theme = "textual-light"
            await d.pilot.pause()
            light |= {style: style_text(d.app.canvas.style_of(style)) for style in dark}
    return screens, dark, light


def _add(colours: Colours, lines: Sequence[Line], cells: Sequence[Iterable[tuple[str, Style]]], screen: str) -> None:
    """Add the colours of each style; a style must have the same colours wherever it is drawn."""
    for line, row in zip(lines, cells, strict=False):
        drawn_line = list(row)
        at = 0
        assert width_of(line) <= SIZE[0], screen
        for text, style, _ in line:
            for c, given in drawn_line[at : at + len(text)]:
                assert colours.setdefault(style, style_text(given)) == style_text(given), (
                    f"{screen}: {style!r} at {c!r}"
                )
            assert "".join(c for c, _ in drawn_line[at : at + len(text)]) == text, screen
            at += len(text)


def test_every_screen_in_colour(runs: MakeRun, at: At) -> None:
    screens, dark, light = asyncio.run(_screens(runs, at))
    compare("colour", {name: "\n".join(map(tagged, lines)).rstrip() + "\n" for name, lines in screens.items()})
    width = max(map(len, dark))
    rows = [f"{style or 'text':{width}}  {dark[style]:34}  {light[style]}" for style in sorted(dark)]
    compare("colours", {"style, dark theme, light theme": "\n".join(rows) + "\n"})
