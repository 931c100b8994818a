"""Sets of ranks as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def ranges(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last rank of each run without a gap, in ascending order."""
    rs = sorted(set(ranks))
    i = 0
    while i < len(rs):
        j = i
        while j + 1 < len(rs) and rs[j + 1] == rs[j] + 1:
            j += 1
        yield rs[i], rs[j]
        i = j + 1


def fold_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """`(0, 1, 2, 3, 8)` as '0-3,8': a group of a thousand ranks is a short string, in the page and in `pgroup.ranks`."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges(ranks))


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
