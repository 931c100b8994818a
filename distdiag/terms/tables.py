"""Tables and paragraphs as lines of plain text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from distdiag.terms.untrusted import visible

WIDTH = 80  # columns, unless a terminal has more
_CODE, _KEPT = re.compile("`[^`]{1,44}`"), "\xa0"  # a space that is no place to break a line


def table(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows as lines, two spaces between columns; those in `left` are aligned to the left, the others to the right."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    put = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    return ["  ".join(p(c, w) for p, c, w in zip(put, row, widths, strict=True)).rstrip() for row in cells]


def wrapped(text: str, width: int = WIDTH, head: str = "") -> list[str]:
    """Return the lines of a text in so many columns. A longer word, as a path may be, and a short piece of code stay whole.

    Each line after the first begins with as many spaces as `head` has characters, at least four: by
    them a reader of logs joins the lines again.
    """
    lines = textwrap.wrap(
        _CODE.sub(lambda m: m[0].replace(" ", _KEPT), visible(text)), width, initial_indent=head,
        subsequent_indent=" " * max(4, len(head)), break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace(_KEPT, " ") for line in lines] or [head]
