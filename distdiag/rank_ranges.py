"""Sets of ranks as text."""

from __future__ import annotations


def fold_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """`(0, 1, 2, 3, 8)` as '0-3,8': a group of a thousand ranks is a short string, in the page and in `pgroup.ranks`."""
    rs = sorted(set(ranks))
    parts: list[str] = []
    i = 0
    while i < len(rs):
        j = i
        while j + 1 < len(rs) and rs[j + 1] == rs[j] + 1:
            j += 1
        parts.append(str(rs[i]) if i == j else f"{rs[i]}-{rs[j]}")
        i = j + 1
    return ",".join(parts)


def unfold_ranks(text: str) -> tuple[int, ...]:
    """Inverse of `fold_ranks`.

    Raises:
        ValueError: `text` is not of that form.
    """
    out: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        out.extend(range(int(first), int(last or first) + 1))
    return tuple(out)
