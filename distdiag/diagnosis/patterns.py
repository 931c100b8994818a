"""The order in which a rank makes its calls: what is repeated, and who has just departed from it.

A program that goes round and round makes one call after the same other. Of ranks that wait for each other in a circle,
the one that lately went from one call to another as it never had before has left something out, or done it twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from distdiag.diagnosis.snapshot import Call, RankState

LATELY = 32  # calls; the circle closes some calls after the departure
HISTORY = 48  # earlier calls, at least
KINDS = 0.25  # at most so many different passages for each of them: else there is no pattern


def departed(states: Iterable[RankState]) -> int | None:
    """The one rank that lately departed from its own pattern while the others kept to theirs; None where not just one."""
    found = []
    for st in states:
        before, now = _passages(st.calls)
        if len(before) < 4 or sum(n for _, n, _ in before) < HISTORY or len(set(before)) > max(2, KINDS * len(before)):
            return None
        if set(now) - set(before):
            found.append(st.rank)
    return found[0] if len(found) == 1 else None


def _passages(calls: tuple[Call, ...]) -> tuple[list[Any], list[Any]]:
    """(what was called, how often in a row, what then), before and lately.

    What is called is the operation, with whom, where, and how far its tag moved on from the last of its kind.
    """
    kinds: list[Any] = []
    tags: dict[Any, int] = {}
    for c in calls:
        kind = (c.op, c.group, c.peer, c.site.key if c.site else None)
        kinds.append((kind, c.tag - tags.get(kind, c.tag)))
        tags[kind] = c.tag
    runs = [(kind, sum(1 for _ in same)) for kind, same in itertools.groupby(kinds)]
    before: list[Any] = []
    now: list[Any] = []
    end = 0
    for i, (kind, n) in enumerate(runs[:-1]):
        end += n
        if i:  # of the first run, the beginning may not be known
            (now if end > len(calls) - LATELY else before).append((kind, n, runs[i + 1][0]))
    return before, now
