"""Tables of fixed columns: as many as fit, the more important first, with help for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from distdiag.tui.draw.lines import Line, Part, explained, merged
from distdiag.tui.draw.text import cells, fit

R = TypeVar("R")
Cell = str | tuple[str, str]  # text, or text and style


@dataclass(frozen=True)
class Column(Generic[R]):
    key: str  # name for sorting; empty where it cannot be sorted by
    title: str  # head, with its unit
    width: int  # cells
    help: str  # what it means, one line
    cell: Callable[[R], Cell]  # text (and style) of a row
    align: str = ">"  # `>` for numbers
    priority: int = 0  # columns with a higher number are left out first
    grow: int = 0  # takes what is left of the line, up to so many cells more
    tail: int = 0  # cells at the right that the title leaves free: a bar after a number
    # makes the parts of a cell for the width that it got, in place of `cell`
    parts: Callable[[R, int], list[Part]] | None = None
    # makes the parts of the title for that width; nothing leaves the title
    head: Callable[[int], list[Part]] | None = None


def choose(columns: Sequence[Column[R]], width: int, lead: int = 0) -> list[tuple[Column[R], int]]:
    """Return the columns that fit in `width` cells after `lead` at the left, in their order, each with its width."""
    chosen: list[Column[R]] = []
    left = width - lead
    for column in sorted(columns, key=lambda c: c.priority):
        if column.width + 1 <= left:
            chosen.append(column)
            left -= column.width + 1
        elif column.priority > 0:
            break  # a less important column must not take the place of a more important one
    out = []
    for column in columns:
        if column in chosen:
            more = min(column.grow, left)
            left -= more
            out.append((column, column.width + more))
    return out


def header(chosen: Sequence[tuple[Column[R], int]], lead: int = 0, sort: str = "", reverse: bool = False) -> Line:
    """Return the header of a table; a click on a title sorts by it, hovering explains it."""
    parts: list[Part] = [(" " * lead, "head", "")]
    for column, width in chosen:
        if column.head is not None and (made := column.head(width)):
            parts += [(" ", "head", ""), *made]
            continue
        title, width = column.title, width - column.tail
        if column.key and column.key == sort and cells(title) < width:
            arrow = "↑" if reverse else "↓"
            title = title + arrow if column.align == "<" else arrow + title
        text = " " + fit(title, width, column.align) + " " * column.tail
        hit = f"sort:{column.key}" if column.key else ""
        parts += explained(((text, "head", hit),), column.title, column.help)
    return tuple(parts)


def row(
    chosen: Sequence[tuple[Column[R], int]], item: R, lead: Sequence[Part] = (), dim: bool = False, hit: str = ""
) -> Line:
    """Return one row after `lead`, the severity's glyph; if `dim`, all is muted but what carries a severity."""
    parts: list[Part] = list(lead)
    for column, width in chosen:
        if column.parts is not None:
            parts += [(" ", "", hit), *((t, s, h or hit) for t, s, h in column.parts(item, width))]
            continue
        got = column.cell(item)
        text, style = got if isinstance(got, tuple) else (got, "")
        if dim and style not in ("error", "warning"):
            style = "muted"
        parts.append((" " + fit(text, width, column.align), style, hit))
    return merged(parts)
