"""Text of a fixed width: what jobs wrote is shown and never interpreted; numbers with their units; sparklines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from functools import lru_cache
from unicodedata import combining, east_asian_width

from distdiag.terms.quantiles import quantile
from distdiag.terms.sites import line_text

# the formatters of terms that the screens use, so that they import their text from one file
from distdiag.terms.units import MISSING, duration, is_number, rate_text, size_text
from distdiag.terms.units import clock as clock
from distdiag.terms.units import counted as counted
from distdiag.terms.units import decimal as decimal
from distdiag.terms.units import delta as delta
from distdiag.terms.units import gib as gib
from distdiag.terms.units import integer as integer
from distdiag.terms.units import milliseconds as milliseconds
from distdiag.terms.untrusted import visible

seconds, size, rate = duration, size_text, rate_text  # short names, as the screens use them often

CACHED = 1000  # characters of a text whose width is kept
SPARKS = "▁▂▃▄▅▆▇█"

# One cell for one cell, so that --ascii changes no layout.
_ASCII = str.maketrans(
    {
        "·": ".", "–": "-", "—": "-", "▲": "!", "█": "#", "×": "x", "○": "o", "●": "*", "‖": "=", "■": "#", "─": "-",
        "│": "|", "├": "|", "└": "`", "Δ": "d", "→": ">", "…": "~", "▏": "|", "↑": "^", "↓": "v", "≥": ">", "≤": "<",
        "▀": "^", "▐": "|", "←": "<", "▎": "|", "▍": "|", "▌": "|", "▋": "#", "▊": "#", "▉": "#", "░": ".", "▬": "-", "◆": "*", "━": "=", "╸": "-",
        "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%", "°": " ", "µ": "u", "±": "~", "›": ">",
    }
)  # fmt: skip
_PLAIN = frozenset(
    "·–▲█×○●‖■─│├└Δ→…▏↑↓≥≤▁▂▃▄▅▆▇°µ±›▀▎▍▌▋▊▉░▬◆━╸←▐" + "".join(map(chr, [*range(32, 127), *range(0x2800, 0x2900)]))
)

clean = visible  # text of the job: an escape sequence in it must be seen, not obeyed


def to_ascii(text: str) -> str:
    """Return `text` in ASCII with the same width: the bracketed glyphs of the help, `?` for anything else."""
    if text.isascii():
        return text
    text = text.translate(_ASCII)
    return "".join(c if ord(c) < 128 else "?" * cells(c) for c in text)


def cells(text: str) -> int:
    """Return the width of `text` in terminal cells, as the terminal library counts them."""
    if text.isascii() or _PLAIN.issuperset(text):
        return len(text)
    return _other_cells(text) if len(text) <= CACHED else _other_cells.__wrapped__(text)


@lru_cache(maxsize=8192)
def _other_cells(text: str) -> int:
    try:
        from rich.cells import cell_len
    except ModuleNotFoundError:  # `tui --once` needs nothing of the live view
        return sum(2 if east_asian_width(c) in "WF" else not combining(c) for c in text)
    return cell_len(text)


def clip(text: str, width: int) -> str:
    """Return `text` in at most `width` cells, cut with an ellipsis."""
    if cells(text) <= width:
        return text
    if width <= 0:
        return ""
    out, used = [], 0
    for ch in text:
        w = cells(ch)
        if used + w > width - 1:
            break
        out.append(ch)
        used += w
    return "".join(out) + "…"


def clip_left(text: str, width: int) -> str:
    """Return text like `clip`, but keep its end: for a path, the file."""
    return text if cells(text) <= width else clip(text[::-1], width)[::-1]


def fit(text: str, width: int, align: str = "<") -> str:
    """Return `text` in exactly `width` cells, `<` left or `>` right."""
    if len(text) <= width and text.isascii():
        return text.rjust(width) if align == ">" else text.ljust(width)
    text = clip(text, width)
    pad = " " * (width - cells(text))
    return pad + text if align == ">" else text + pad


def within(parts: Sequence[str], width: int) -> str:
    """Return the first parts next to each other, as many as fit into `width` cells, but one."""
    n = next((n for n in range(len(parts), 1, -1) if cells("   ".join(parts[:n])) <= width), 1)
    return "   ".join(parts[:n])


def wrap(text: str, width: int, most: int | None = None) -> list[str]:
    """Return `text` on (at most `most`) lines of at most `width` cells, broken at spaces if possible, in time linear in its length."""
    lines: list[str] = []
    line: list[str] = []
    used = 0
    for word in text.split(" "):
        whole = cells(word)
        for nth, piece in enumerate(_pieces(word, width)):
            size, begun = cells(piece), bool(line and line[0].strip())
            if nth or (begun and used + 1 + whole > width):
                lines.append(" ".join(line))
                begun = False
            if begun:
                line.append(piece)
                used += 1 + size
            else:
                line, used = [piece], size
    lines.append(" ".join(line))
    if most is not None and len(lines) > most:
        lines[most - 1 :] = [clip(" ".join(lines[most - 1 :]), width)]
    return lines


def _pieces(word: str, width: int) -> Iterator[str]:
    """Yield a word in pieces of less than `width` cells, the last of at most that."""
    left, begin, used = cells(word), 0, 0
    for i, ch in enumerate(word if left > width else ""):
        size = cells(ch)
        if i > begin and used + size >= max(2, width):
            yield word[begin:i]
            left, begin, used = left - used, i, 0
            if left <= width:
                break
        used += size
    yield word[begin:]


def percent(v: float | None) -> str:
    return f"{v:.0f}%" if is_number(v) else MISSING


def three_digits(v: float | None) -> str:
    """Return `2.93`, `64.0`, `1,200`: three digits or more."""
    return decimal(v, 2 if v is not None and v < 9.995 else 1 if v is not None and v < 999.5 else 0)


def short_size(v: float | None) -> str:
    """Return bytes for a table cell: `25.0M`."""
    return size(v).replace(" ", "").replace("iB", "") if is_number(v) else ""


def place(file: str | None, line: float | None, function: str | None = None, width: int = 0) -> str:
    """Return `train.py:118 in next_batch`: only the file's name, or as much of the path as fits into `width`."""
    if not file:
        return MISSING
    base = clean(line_text(file, line, function, base=True))
    if width:
        full = clean(line_text(file, line, function))
        return clip_left(full, width) if width > cells(base) else clip(base, width)
    return base


def quote(path: object) -> str:
    """Return a path as it can be typed in a shell; control characters are shown."""
    return clean(shlex.quote(str(path)))


def spark(values: Sequence[float | None], width: int) -> str:
    """Return the last `width` values as bars; a flat series stays low, gaps are gaps.

    The scale runs from the smallest to at least 1.3 times the median, so that noise of a per cent draws no mountains,
    and to at most three times the median, so that one compiled first step does not flatten all others.
    """
    shown = list(values)[-width:]
    known = sorted(v for v in shown if v is not None and math.isfinite(v))
    if not known:
        return ""
    low = known[0]
    middle = quantile(known, 0.5) or 0.0
    high = max(min(known[-1], middle * 3) if middle > 0 else known[-1], middle * 1.3, low + 1e-9)
    out = []
    for v in shown:
        if v is None or not math.isfinite(v):
            out.append(" ")
        else:
            out.append(SPARKS[min(7, int((v - low) / (high - low) * 7.99))])
    return "".join(out)
