"""Lines of styled parts: what every screen consists of, in the terminal app, in `--once` and in the tests.

A part is `(text, style, hit)`. `style` names a meaning, never a colour: several may be joined by spaces. `hit` says
what a click there does: `row:5`, `sort:self_ms`, `do:screen('comm')`; `explained` adds what the part is, for `?` and
the tooltips.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from distdiag.tui.draw.text import cells, clip, counted, to_ascii, wrap

Part = tuple[str, str, str]
Line = tuple[Part, ...]

STYLES = (
    "muted", "bold", "error", "warning", "title", "head", "key", "cursor", "accent",
    "data", "forward", "backward", "optimizer", "other",
)  # fmt: skip
BLANK: Line = ()
_ABOUT = "\x1f"  # between what a click does and what the part is; `clean` leaves no such character in text of the job


def line(*parts: str | Part | tuple[str, str]) -> Line:
    """Return a line of strings, `(text, style)` pairs and whole parts; empty texts are left out."""
    out: list[Part] = []
    for p in parts:
        full: Part = (p, "", "") if isinstance(p, str) else (p[0], p[1], p[2] if len(p) == 3 else "")
        if full[0]:
            out.append(full)
    return tuple(out)


def labelled(
    label: str, text: str, width: int, style: str = "", hit: str = "", *, of_label: str = "muted"
) -> list[Line]:
    """Return text on lines of at most `width` cells, next to a label that only the first of them has."""
    blank = " " * cells(label)
    rows = wrap(text, width - len(blank))
    return [line((blank if i else label, of_label, hit), (row, style, hit)) for i, row in enumerate(rows)]


def width_of(text: Line) -> int:
    return sum(cells(p[0]) for p in text)


def plain(text: Line) -> str:
    return "".join(p[0] for p in text).rstrip()


def fitted(text: Line, width: int) -> Line:
    """Return the line in at most `width` cells, cut with an ellipsis."""
    if width_of(text) <= width:
        return text
    out: list[Part] = []
    left = width
    for t, style, hit in text:
        w = cells(t)
        if w >= left:
            # the ellipsis belongs here if this part is cut, or if anything after it is lost
            out.append((clip(t + " ", left) if w == left else clip(t, left), style, hit))
            break
        out.append((t, style, hit))
        left -= w
    return tuple(out)


def marked(text: Line, width: int) -> Line:
    """Return the line over its whole width as the row under the cursor."""
    hit = text[0][2] if text else ""
    padded = (*text, (" " * max(0, width - width_of(text)), "", hit))
    return tuple((t, f"{s} cursor".strip(), h) for t, s, h in padded)


def merged(parts: Iterable[Part]) -> Line:
    """Return the parts with neighbours of the same style and hit as one: every part costs time at every drawing."""
    out: list[Part] = []
    for part in parts:
        if out and out[-1][1] == part[1] and out[-1][2] == part[2]:
            out[-1] = (out[-1][0] + part[0], part[1], part[2])
        else:
            out.append(part)
    return tuple(out)


def ascii_line(text: Line) -> Line:
    return tuple((to_ascii(t), s, h) for t, s, h in text)


def rule(width: int, title: str = "") -> Line:
    """Return a thin line across the screen, with a title at its left."""
    if not title:
        return line(("─" * width, "muted"))
    title = clip(title, max(0, width - 2))
    return line((" ─", "muted"), (title, "muted"), ("─" * max(0, width - 2 - cells(title)), "muted"))


def cut(lines: list[Line], room: int, how: str = "a taller terminal shows them") -> list[Line]:
    """Return at most `room` lines; if some are left out, the last line counts them, and says how to see them."""
    if len(lines) <= room:
        return lines
    missing = counted(len(lines) - room + 1, "more line")
    return [*lines[: room - 1], line((f"   … {missing}: {how}", "muted"))]


def hit_at(text: Line, x: int) -> str:
    """Return the hit at cell `x` of the line; empty if there is none."""
    at = 0
    for t, _, hit in text:
        at += cells(t)
        if x < at:
            return hit
    return ""


def explained(text: Line, term: str, about: str) -> Line:
    """Return the line with `term: about` as the explanation of all its parts."""
    if not about:
        return text
    return tuple((t, s, f"{hit.partition(_ABOUT)[0]}{_ABOUT}{term}: {about}") for t, s, hit in text)


def split_hit(hit: str) -> tuple[str, str]:
    """Return what a click does, and what the part is."""
    action, _, about = hit.partition(_ABOUT)
    return action, about


def explanations(lines: Iterable[Line]) -> tuple[str, ...]:
    """Return what is explained on a screen, each once, in its order."""
    found = (split_hit(hit)[1] for text in lines for _, _, hit in text)
    return tuple(dict.fromkeys(about for about in found if about))


def joined(left: Line, right: Line, width: int) -> Line:
    """Return two halves at the ends of one line; the right one is dropped if both do not fit."""
    gap = width - width_of(left) - width_of(right)
    return (*left, (" " * gap, "", ""), *right) if gap >= 1 else left


@dataclass(frozen=True)
class Screenful:
    """A whole screen: as many lines as the terminal has, or fewer."""

    lines: list[Line] = field(default_factory=list)  # from the top
    rows: int = 1  # how many items of the list are shown: what PgUp and PgDn move by
    cursor: int | None = None  # line number of the cursor; None if there is none
