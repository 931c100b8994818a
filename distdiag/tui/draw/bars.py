"""Bars in eighths of a cell: the phases of a step stacked to one scale, and small bars in cells of a table."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.terms.steps import split
from distdiag.tui.draw.lines import Part, explained
from distdiag.tui.draw.palette import ABOUT, LETTERS, PHASES, SHORT, WORDS
from distdiag.tui.draw.text import cells

EIGHTHS = " ▏▎▍▌▋▊▉█"


def phases_of(row: object) -> list[tuple[str, float]]:
    """Return the phases of a rank's step as bars show them, ms: copies to the device are in `other`, waiting is last."""
    parts = split(row)
    parts["other"] += parts.pop("h2d")
    return list(parts.items())


def stacked(
    segments: Sequence[tuple[str, float]], scale: float, width: int, *, colour: bool = True, words: bool = True
) -> list[Part]:
    """Return segments (name of a phase, its length) one after another in `width` cells, which represent `scale`.

    Without `colour` they are letters. With `words`, a phase's name is in its segment where it has room.
    """
    if scale <= 0:
        return [(" " * width, "", "")]
    ends, at = [], 0.0
    for name, value in segments:
        at += max(0.0, value)
        ends.append((name, min(width * 8, round(at / scale * width * 8))))
    if not colour:
        return _letters(ends, width)
    out: list[Part] = []
    cell = nth = 0
    while cell < width:
        while nth < len(ends) and ends[nth][1] <= cell * 8:
            nth += 1
        if nth == len(ends):
            out.append((" " * (width - cell), "", ""))
            break
        name, end = ends[nth]
        full = end // 8 - cell
        if full > 0:
            out.append(_run(name, full, words))
            cell += full
        else:  # the segment ends inside this cell: it and what follows share it
            after = next((n for n, e in ends[nth:] if e > cell * 8 + 7), None)
            share = end - cell * 8
            out.append((EIGHTHS[share], f"area-{name}" + (f" on-{after}" if after else ""), ""))
            cell += 1
    return out


def _run(name: str, n: int, words: bool) -> Part:
    text = ""
    if words:
        text = next((f" {w}" for w in (WORDS[name], SHORT[name]) if cells(w) + 2 <= n), "")
    return (text.ljust(n), f"in-{name}", "")


def _letters(ends: list[tuple[str, int]], width: int) -> list[Part]:
    out: list[Part] = []
    used = 0
    for name, end in ends:
        n = round(end / 8) - used
        if n > 0:
            out.append((LETTERS[name] * n, "muted" if name == "wait" else "", ""))
            used += n
    return [*out, (" " * (width - used), "", "")] if used < width else out


def gauge(share: float | None, width: int, *, colour: bool = True, style: str = "fill") -> list[Part]:
    """Return a share in 0..1 as a bar of exactly `width` cells; empty if not measured."""
    if share is None or share != share:
        return [(" " * width, "", "")]
    full, half = divmod(round(max(0.0, min(1.0, share)) * width * 2), 2)
    if not colour:
        return [("━" * full + "·" * (width - full), "muted", "")]
    text = "━" * full + ("╸" if half else "")
    return [(text, f"area-{style}", ""), ("━" * (width - len(text)), "area-track", "")]


def legend(width: int, *, colour: bool = True, parts: Sequence[str] = PHASES) -> list[Part]:
    """Return swatch (or letter) and word of each part that fits into `width`; all words short, or all long."""
    for names, gap in ((WORDS, "  "), (SHORT, "  "), (SHORT, " ")):
        swatch = "█ " if colour and names is WORDS else "▌" if colour else ""
        needed = sum(cells(names[p]) + len(swatch or "x ") + len(gap) for p in parts) - len(gap)
        if needed <= width:
            out: list[Part] = []
            for i, p in enumerate(parts):
                mark = swatch if colour else f"{LETTERS[p]} "
                text = names[p] + (gap if i < len(parts) - 1 else "")
                out += explained(((mark, f"area-{p}" if colour else "", ""), (text, "muted", "")), WORDS[p], ABOUT[p])
            return out
    return []
