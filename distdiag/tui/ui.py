"""What the person chose: page, cursor, order, filter, moment. Holds no data of the job."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from distdiag.tui.data.filters import Filter


@dataclass
class Ui:
    page: str = "ranks"
    back: list[str] = field(default_factory=list)
    cursor: dict[str, Hashable] = field(default_factory=dict)
    top: dict[str, int] = field(default_factory=dict)
    sort: str = "severity"
    reverse: bool = False
    filter: Filter = field(default_factory=lambda: Filter(""))
    group: bool = False
    follow: bool = False
    metric: str = "delta"
    per: int = 1  # steps of one cell of the heat map
    step: int | None = None  # under the cursor of the heat map; None follows the newest
    end_step: int | None = None  # the last one in the heat map
    span_s: float | None = None  # seconds of the timeline; None as many as the job needs
    until_s: float | None = None  # its right edge; None follows the job
    rank: int | None = None  # of the detail page
    paused_at_s: float | None = None  # moment of the run that is shown instead of the newest
    ascii: bool = False
    colour: bool = True  # False: phases are letters, heat is digits
    interactive: bool = True  # False for --once: no cursor, no key bar
    message: str = ""  # answers the last key; gone with the next
    explained: tuple[str, ...] = ()  # what was on the screen `explained_page` when `?` was pressed
    explained_page: str = ""
    typing: bool = False  # the filter line is open
    rows: int = 10  # items on the screen at the last drawing
    busy: str = ""  # what runs in the background

    @property
    def drawn(self) -> bool:
        return self.colour and not self.ascii

    def opens(self, key: str, screen: str) -> str:
        """Return how to open a screen: its key, or the command if no key can be pressed."""
        return f"press {key}" if self.interactive else f"distdiag tui --screen {screen}"

    def window(self, page: str, items: Sequence[Hashable], rows: int) -> tuple[int, int | None]:
        """Return the first item shown and the index of the cursor; keeps the cursor on its item and on the screen."""
        rows = max(1, rows)
        if not items or not self.interactive:
            return 0, None
        index = self.index(page, items)
        top = min(self.top.get(page, 0), max(0, len(items) - rows))
        top = max(min(top, index), index - rows + 1, 0)
        self.top[page] = top
        return top, index

    def index(self, page: str, items: Sequence[Hashable]) -> int:
        """Return the index of the cursor in `items`; 0 until it is moved."""
        if page not in self.cursor:
            return 0
        try:
            return items.index(self.cursor[page])
        except ValueError:
            return min(self.top.get(page, 0), len(items) - 1)

    def move(self, page: str, items: Sequence[Hashable], by: int) -> None:
        """Move the cursor by so many items, at most to the ends."""
        if items:
            self.cursor[page] = items[max(0, min(len(items) - 1, self.index(page, items) + by))]
