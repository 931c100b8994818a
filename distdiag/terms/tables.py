"""Tables as lines of plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows as lines, two spaces between columns; those in `left` are aligned to the left, the others to the right."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    put = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    return ["  ".join(p(c, w) for p, c, w in zip(put, row, widths, strict=True)).rstrip() for row in cells]
