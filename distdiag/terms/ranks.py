"""Sets of ranks: as text, and by a value that they have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import TypeVar

from distdiag.terms.untrusted import MAX_RANKS, is_rank

Key = TypeVar("Key")
Value = TypeVar("Value", bound=Hashable)
Member = TypeVar("Member", bound=Hashable)


def by_value(values: Mapping[Key, Value]) -> dict[Value, list[Key]]:
    """Return the keys (ranks) that have each value, in the order in which the values first occur."""
    return grouped((value, rank) for rank, value in values.items())


def grouped(pairs: Iterable[tuple[Value, Key]]) -> dict[Value, list[Key]]:
    """Return what comes with each first value, in the order in which the values first occur."""
    out: dict[Value, list[Key]] = {}
    for value, key in pairs:
        out.setdefault(value, []).append(key)
    return out


def sets_of(pairs: Iterable[tuple[Value, Member]]) -> dict[Value, set[Member]]:
    """Return the different things that come with each first value."""
    return {value: set(members) for value, members in grouped(pairs).items()}


def ranges(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last rank of each run of consecutive ranks, in ascending order."""
    # in such a run the difference between a rank and its position stays the same
    for _, run in groupby(enumerate(sorted(set(ranks))), key=lambda at: at[1] - at[0]):
        found = [rank for _, rank in run]
        yield found[0], found[-1]


def fold_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """Return `(0, 1, 2, 3, 8)` as '0-3,8', to keep large groups short in the page and in `pgroup.ranks`."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges(ranks))


def unfold_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in '0-3,8': the inverse of `fold_ranks`.

    Raises:
        ValueError: `text` is not of that form, or names more ranks than a job can have.
    """
    out: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not (is_rank(low) and is_rank(high)) or len(out) > MAX_RANKS:
            raise ValueError(f"ranks out of range: {part:.40}")
        out.extend(range(low, high + 1))
    return tuple(out)
