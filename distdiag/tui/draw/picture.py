"""A screen as one SVG file: no font, script or address of another host; bars, dots and lines are drawn as shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape

from rich.style import Style

from distdiag.tui.draw.lines import Line
from distdiag.tui.draw.text import cells

CELL_W, CELL_H, FONT = 8.4, 18.0, 14
MARGIN, TITLE = 10, 34
_FONTS = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# glyphs drawn as rectangles: (x, y, width, height) in shares of a cell
_HALF = 0.5
_Shapes = dict[str, tuple[tuple[float, float, float, float], ...]]
_EIGHTHS: _Shapes = {c: ((0.0, 0.0, (i + 1) / 8, 1.0),) for i, c in enumerate("▏▎▍▌▋▊▉█")}
_LEVELS: _Shapes = {c: ((0.0, 1 - (i + 1) / 8, 1.0, (i + 1) / 8),) for i, c in enumerate("▁▂▃▄▅▆▇")}
_SHAPES: _Shapes = (
    _EIGHTHS
    | _LEVELS
    | {
        "▀": ((0, 0, 1, _HALF),),
        "◆": ((0.2, 0.35, 0.6, 0.3), (0.35, 0.25, 0.3, 0.5)),
        "▐": ((_HALF, 0, _HALF, 1),),
        "─": ((0, 0.47, 1, 0.06),),
        "━": ((0, 0.42, 1, 0.16),),
        "╸": ((0, 0.42, 0.5, 0.16),),
        "│": ((0.46, 0, 0.09, 1),),
        "└": ((0.46, 0, 0.09, 0.5), (0.46, 0.47, 0.54, 0.06)),
        "▬": ((0, 0.36, 1, 0.28),),
    }
)
_WORDS = re.compile(r"\S+(?: \S+)*")
_BRAILLE = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))  # column and row of each bit


def svg(lines: Sequence[Line], style_of: Callable[[str], Style], width: int, title: str) -> str:
    """Return the lines as an SVG picture of `width` cells, in a window with a title."""
    base = style_of("")
    ground, ink = _hex(base.bgcolor, "#121212"), _hex(base.color, "#e0e0e0")
    w, h = width * CELL_W + 2 * MARGIN, len(lines) * CELL_H + TITLE + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.1f} {h:.1f}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{w:.1f}" height="{h:.1f}" rx="8" fill="{ground}" stroke="#6b6b6b" stroke-opacity=".5"/>',
        *(f'<circle cx="{18 + 18 * i}" cy="17" r="5.5" fill="{c}"/>' for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))),
        f'<text x="{w / 2:.1f}" y="21" text-anchor="middle" font-family="system-ui, sans-serif" font-size="13" fill="{ink}" fill-opacity=".75">{escape(title)}</text>',
        f'<g font-family="{_FONTS}" font-size="{FONT}" fill="{ink}" xml:space="preserve" transform="translate({MARGIN},{TITLE})">',
    ]  # fmt: skip
    for y, text in enumerate(lines):
        out += _row(text, y * CELL_H, style_of, ground, ink)
    return "\n".join([*out, "</g>", "</svg>", ""])


def _row(text: Line, y: float, style_of: Callable[[str], Style], ground: str, ink: str) -> Iterable[str]:
    x = 0
    for run, names, _ in text:
        style = style_of(names)
        back, colour = _hex(style.bgcolor, ground), _hex(style.color, ink)
        n = cells(run)
        if back != ground:
            yield f'<rect x="{x * CELL_W:.1f}" y="{y:.1f}" width="{n * CELL_W + 0.1:.1f}" height="{CELL_H + 0.1:.1f}" fill="{back}"/>'
        yield from _glyphs(run, x, y, colour)
        plain = "".join(" " if c in _SHAPES or _is_braille(c) else c for c in run)
        look = ' font-weight="700"' * bool(style.bold) + ' text-decoration="underline"' * bool(style.underline)
        look += f' fill="{colour}"' if colour != ink else ""
        for found in _WORDS.finditer(plain):  # a run of spaces is not text: its width would depend on the font
            at, word = x + cells(plain[: found.start()]), found[0]
            yield (
                f'<text x="{at * CELL_W:.1f}" y="{y + 13.5:.1f}" textLength="{cells(word) * CELL_W:.1f}"'
                f' lengthAdjust="spacingAndGlyphs"{look}>{escape(word)}</text>'
            )
        x += n


def _glyphs(run: str, x: int, y: float, colour: str) -> Iterable[str]:
    """Return the shapes of the glyphs that are drawn, equal neighbours merged; braille dots in one path."""
    path: list[str] = []
    at = 0
    while at < len(run):
        c = run[at]
        if c in _SHAPES:
            n = len(run[at:]) - len(run[at:].lstrip(c))
            whole = all(w == 1 for _, _, w, _ in _SHAPES[c])
            for left, top, w, tall in _SHAPES[c]:
                for i in range(1 if whole else n):
                    wide = (n if whole else w) * CELL_W
                    path.append(_rect((x + at + i + left) * CELL_W, y + top * CELL_H, wide, tall * CELL_H))
            at += n
            continue
        if _is_braille(c):
            for bit, (column, row) in enumerate(_BRAILLE):
                if (ord(c) - 0x2800) >> bit & 1:
                    path.append(_rect((x + at + 0.12 + 0.5 * column) * CELL_W, y + (row + 0.2) / 4 * CELL_H, 2.6, 2.8))
        at += 1
    if path:
        yield f'<path fill="{colour}" d="{"".join(path)}"/>'


def _rect(x: float, y: float, w: float, h: float) -> str:
    return f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z"


def _is_braille(c: str) -> bool:
    return "\u2800" <= c <= "\u28ff"


def _hex(colour: object, default: str) -> str:
    get = getattr(colour, "get_truecolor", None)
    return default if get is None else get().hex
