"""Witness by the order of calls: which rank has departed from the sequence that it repeated until then.

A training loop makes the same calls in the same order. Of ranks that wait for each other in a cycle, the one that recently
went from one call to another as it never had before has left a call out, or made it twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.graph import Wait

LATELY = 32  # calls; the cycle closes some calls after the departure
HISTORY = 48  # earlier calls, at least
SEEN, LONGEST = 3, 24  # times that the same calls, at most so many in a row, were followed by one and the same
KINDS = 0.25  # at most so many different passages for each of them: else there is no pattern


def departed(members: Iterable[RankState], others: Iterable[RankState] = ()) -> int | None:
    """Return the one rank that recently departed from its own pattern while the others kept to theirs; None if not just one.

    Args:
        members: Of the cycle.
        others: The rest of the job: if one of them has departed, too, the program has entered something new.
    """
    found = []
    for st in members:
        new = _has_departed(st)
        if new is None:
            return None
        if new:
            found.append(st.rank)
    return found[0] if len(found) == 1 and not any(map(_has_departed, others)) else None


def _has_departed(st: RankState) -> bool | None:
    """True if it recently went from one call to another as never before; None if there is no pattern."""
    before, now = _passages(st.calls)
    if len(before) < 4 or sum(n for _, n, _ in before) < HISTORY or len(set(before)) > max(2, KINDS * len(before)):
        return None
    return bool(set(now) - set(before))


def _with_tags(calls: tuple[Call, ...]) -> list[Any]:
    """Return of each call the operation, with whom, where, and how far its tag moved on from the last of its kind."""
    kinds: list[Any] = []
    tags: dict[Any, int] = {}
    for c in calls:
        kind = (c.op, c.group, c.peer, c.site.key if c.site else None)
        kinds.append((kind, c.tag - tags.get(kind, c.tag)))
        tags[kind] = c.tag
    return kinds


def _passages(calls: tuple[Call, ...]) -> tuple[list[Any], list[Any]]:
    """Return (what was called, how often in a row, what came next), earlier and recently."""
    runs = [(kind, sum(1 for _ in same)) for kind, same in itertools.groupby(_with_tags(calls))]
    before: list[Any] = []
    now: list[Any] = []
    end = 0
    for i, (kind, n) in enumerate(runs[:-1]):
        end += n
        if i:  # of the first run, the beginning may not be known
            (now if end > len(calls) - LATELY else before).append((kind, n, runs[i + 1][0]))
    return before, now


def passed_over(members: Iterable[RankState]) -> int | None:
    """Return the one rank that is in another call than was due after its preceding calls, if all others are in theirs."""
    found = [(st.rank, _in_due(st)) for st in members]
    odd = [rank for rank, due in found if due is False]
    return odd[0] if len(odd) == 1 and all(due is not None for _, due in found) else None


def _in_due(st: RankState) -> bool | None:
    """True if a rank is in the call that always followed its preceding calls and steps; None if no call always did.

    DDP's own collectives are not among the calls of a rank: the end of the step stands for them.
    """
    here = st.blocked
    if here is None:
        return None
    at = next((i for i in reversed(range(len(st.calls))) if _same(st.calls[i], here)), len(st.calls))
    calls = (*st.calls[:at], here)
    if any(c.entered_s is None for c in calls):
        return None
    times = [c.entered_s or 0.0 for c in calls]
    steps = [(x.end_s, "step") for x in st.steps if times[0] < x.end_s < times[-1]]
    kinds = [kind for _, kind in sorted([*zip(times, _with_tags(calls), strict=True), *steps], key=lambda x: x[0])]
    if at == len(st.calls):
        kinds[-1] = "step"
    due = _follower(kinds[:-1])
    return None if due is None else due == kinds[-1]


def _same(a: Call, b: Call) -> bool:
    return (a.op, a.group, a.seq, a.peer, a.nth) == (b.op, b.group, b.seq, b.peer, b.nth)


def _follower(kinds: list[Any]) -> Any:
    """Return what always followed the newest of these calls, at least `SEEN` times; None if not one and the same did."""
    for k in range(1, min(LONGEST, len(kinds) - 1) + 1):
        last = kinds[-k:]
        followers = [kinds[i + k] for i in range(len(kinds) - k) if kinds[i : i + k] == last]
        if len(followers) < SEEN:
            return None
        if len(set(followers)) == 1:
            return followers[0]
    return None


def left_by(states: Mapping[int, RankState], wait: Wait) -> frozenset[int]:
    """Return the side of a conflict whose call has never followed the preceding calls, if the other side's always has; else none."""
    sides = [frozenset(side) for side in wait.sides]
    if wait.p2p or len(sides) != 2 or any(r not in states or r not in wait.calls for side in sides for r in side):
        return frozenset()
    due = {_due(states[r].calls, wait.group, wait.seq) for side in sides for r in side}
    if len(due) != 1 or None in due:
        return frozenset()
    (kind,) = due
    right = [{_kind(wait.calls[r]) == kind for r in side} for side in sides]
    if right == [{True}, {False}]:
        return sides[1]
    return sides[0] if right == [{False}, {True}] else frozenset()


def _kind(c: Call) -> tuple[Any, ...]:
    return c.op, c.site.key if c.site else None, c.root, compatible.dtype_name(c.dtype), compatible.elements(c)


def _due(calls: tuple[Call, ...], group: str, seq: int) -> tuple[Any, ...] | None:
    """Return the kind of call that always followed the newest calls of this group before `seq`; None if more than one did."""
    numbered = sorted(
        ((c.seq, c) for c in calls if c.group == group and c.seq is not None and c.seq < seq), key=lambda x: x[0]
    )
    if [n for n, _ in numbered] != list(range(seq - len(numbered), seq)):
        return None  # some are not known
    return _follower([_kind(c) for _, c in numbered])
