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
KINDS = 0.25  # at most so many different transitions for each of them: else there is no pattern


def departed(states: Iterable[RankState]) -> int | None:
    """The one rank that lately departed from its own pattern while the others kept to theirs; None where not just one."""
    found = []
    for st in states:
        before, now = _transitions(st.calls)
        if len(before) < HISTORY or len(set(before)) > KINDS * len(before):
            return None
        if set(now) - set(before):
            found.append(st.rank)
    return found[0] if len(found) == 1 else None


def _transitions(calls: tuple[Call, ...]) -> tuple[list[Any], list[Any]]:
    """From each call to the next, before and lately; with how far the tag moved on from the last message of its kind."""
    kinds: list[tuple[Any, int]] = []
    tags: dict[Any, int] = {}
    for c in calls:
        kind = (c.op, c.group, c.peer, c.site.key if c.site else None)
        tag = c.tag or 0
        kinds.append((kind, tag - tags.get(kind, tag)))
        tags[kind] = tag
    steps = list(itertools.pairwise(kinds))
    return steps[:-LATELY], steps[-LATELY:]
