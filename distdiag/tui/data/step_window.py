"""Some columns of the steps that a screen shows, of some ranks: only what is new is read again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run

Steps = dict[int, dict[int, tuple[Any, ...]]]  # by step and rank: the values of the columns


def read(
    run: Run, cache: dict[Any, Any], slot: str, columns: Sequence[str], ranks: Iterable[int], span: tuple[int, int, int],
    newest: int,
) -> Steps:  # fmt: skip
    """Return the steps of a span: first and last step, and how far apart those are that are read.

    They are kept in the cache under `slot`. The `newest` step and the one before may lack ranks that have not written
    yet, and are read again.
    """
    ranks, (first, last, stride) = tuple(ranks), span
    key = (tuple(columns), ranks, stride)
    before, steps = cache.get(slot, (None, {}))
    steps = {s: row for s, row in steps.items() if first <= s <= last and s < newest - 1} if before == key else {}
    missing = [s for s in range(first, last + 1, stride) if s not in steps]
    steps |= {s: {} for s in missing}
    if missing and ranks:
        for step, rank, *values in run.step_values(columns, missing[0], missing[-1], ranks, stride):
            steps[step][rank] = tuple(values)
    cache[slot] = (key, steps)
    return steps


def some_ranks(frame: Frame, most: int, without: int | None = None) -> list[int]:
    """Return the ranks of a frame; of more than `most` as many, evenly spread."""
    every = [int(r) for r in frame.table.numbers("rank") if r != without]
    return every if len(every) <= most else every[:: len(every) // most]
