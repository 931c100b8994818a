"""Help, generated from the keys and the column definitions, so that it stays current."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

from distdiag.tui.data import filters
from distdiag.tui.data.order import ORDERS
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw import severity
from distdiag.tui.draw.lines import BLANK, Line, Screenful, labelled, line
from distdiag.tui.draw.text import cells, fit, wrap
from distdiag.tui.keys import KEYS
from distdiag.tui.screens.page import Page, Sheet
from distdiag.tui.screens.ranks_columns import ERROR_PCT, WARN_PCT, all_columns
from distdiag.tui.ui import Ui


@lru_cache(maxsize=8)
def help_lines(width: int, screen: str = "", terms: tuple[str, ...] = ()) -> tuple[Line, ...]:
    """Return all lines: first what is on the screen that `?` was pressed on, then what is the same on all of them."""
    out: list[Line] = []

    def section(title: str, rows: Sequence[tuple[str, str]], left: int, style: str = "key") -> None:
        out.append(line((f" {title}", "head")))
        for term, text in rows:
            if cells(term) > left:
                out.append(line(f"   {term}"))
                term = ""
            out.extend(labelled(f"   {fit(term, left)}  ", text, width - 1, of_label=style))
        out.append(BLANK)

    for text in (
        "In a synchronous job every rank has the same step time, so step time finds nobody.",
        "The slow rank is the one that waits least: look at self ms = step - wait, and at Δ self.",
    ):
        out += [line((f" {piece}", "bold")) for piece in wrap(text, width - 2)]
    out.append(BLANK)
    if terms:
        title = f"on the screen {screen} (hover over it, or click, for the same)"
        section(title, [(term, about) for term, _, about in (t.partition(": ") for t in terms)], 24, "bold")
    section("keys", [(k.shown, k.help + (f" (on {', '.join(k.pages)})" if k.pages else "")) for k in KEYS], 8)
    marks = [(f"{m.glyph}  {m.ascii}  {m.word}", m.meaning) for m in severity.MARKS]
    section("severity: glyph, --ascii, word", marks, 14, "")
    text = f"Δ self is coloured: yellow from {WARN_PCT:g}% of the step time, red from {ERROR_PCT:g}%."
    text += " The state column shows findings: a straggler needs a sustained share of steps."
    out[-1:] = [*(line((f"   {piece}", "muted")) for piece in wrap(text, width - 4)), BLANK]
    section("columns of the rank table", [(c.title, c.help) for c in all_columns() if c.help], 16, "bold")
    section("sort orders (s, or click on a column)", [(o.key, o.title) for o in ORDERS], 16, "bold")
    section("filter (/): words joined by AND", list(filters.HELP), 18, "bold")
    return tuple(out)


class HelpPage(Page[None]):
    name = title = "help"
    question = "what do the keys and the columns mean?"

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return range(200)

    def rank_of(self, snap: Snapshot, item: Hashable) -> None:
        """No line of this screen is about one rank."""

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        every = help_lines(width, ui.explained_page, ui.explained)
        sheet = Sheet(width, height if ui.interactive else len(every) + 2, (), [self.head(snap, ui, width), BLANK])
        items, room = range(len(every)), height - 3 if ui.interactive else len(every)
        sheet.list(ui, "help", items, room, lambda some: (every[nth] for nth in some), "   lines")
        return sheet.done()
