"""Evidence from the order of a rank's own calls: who broke the sequence that it had repeated until then.

A training loop repeats the same calls in the same order. Some ranks wait for each other in a cycle, and one of them recently made
a transition from one call to another for the first time: it left a call out, or made it twice. Stages of a pipeline make
different calls: no histories of two ranks can be compared there, as `divergence` does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState

LATELY = 32  # calls; the cycle closes some calls after the rank broke its sequence
HISTORY = 48  # minimum of earlier calls
ROUNDS = 4  # earlier passages or rounds, at least
KINDS = 0.25  # most distinct transitions per transition; above this there is no pattern


def pattern(case: Case) -> Testimony | None:
    """Accuse the one member of a cycle that recently broke its own sequence while all other ranks kept theirs."""
    others = (state for rank, state in case.states.items() if rank not in case.incident.members)
    rank = departed((case.states[r] for r in case.compared), others)
    if rank is None:
        return None
    return Testimony(
        ranks=(rank,), text=f"; {rank_list([rank])} has left the order of its earlier calls, the others kept theirs"
    )


def departed(members: Iterable[RankState], others: Iterable[RankState] = ()) -> int | None:
    """Return the one rank that recently broke its own sequence while the others kept theirs; None if not exactly one.

    Args:
        members: The ranks of the cycle.
        others: The rest of the job: if one of them broke its sequence, too, the program has entered something new.
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
    """True if its recent calls have a transition that it never made before, or its last round has other calls than every earlier
    one; None if there is no pattern.
    """
    before, now = _passages(st.calls)
    if len(before) < ROUNDS or sum(n for _, n, _ in before) < HISTORY or not _repeat(before):
        return None
    return bool(set(now) - set(before)) or _other_round(st.calls)


def _repeat(seen: Sequence[Any]) -> bool:
    return len(seen) >= ROUNDS and len(set(seen)) <= max(2, KINDS * len(seen))


def _other_round(calls: tuple[Call, ...]) -> bool:
    """True if the calls between the last two times that it came to its newest call are others than in every earlier round."""
    kinds = [kind for kind, _ in _with_tags(calls)]
    starts = [i for i, kind in enumerate(kinds) if kind == kinds[-1] and (i == 0 or kinds[i - 1] != kind)]
    *before, last = (frozenset(Counter(kinds[a:b]).items()) for a, b in itertools.pairwise([0, *starts]))
    return _repeat(before[1:]) and last not in before[1:]  # the first round may have begun earlier


def _with_tags(calls: tuple[Call, ...]) -> list[Any]:
    """Return for each call: operation, peer, site, and the tag's increment since the last call of its kind."""
    kinds: list[Any] = []
    tags: dict[Any, int] = {}
    for c in calls:
        kind = (c.op, c.group, c.peer, c.site.key if c.site else None)
        kinds.append((kind, c.tag - tags.get(kind, c.tag)))
        tags[kind] = c.tag
    return kinds


def _passages(calls: tuple[Call, ...]) -> tuple[list[Any], list[Any]]:
    """Return the (call, repetitions, next call) transitions, earlier and recent."""
    runs = [(kind, sum(1 for _ in same)) for kind, same in itertools.groupby(_with_tags(calls))]
    before: list[Any] = []
    now: list[Any] = []
    end = 0
    for i, (kind, n) in enumerate(runs[:-1]):
        end += n
        if i:  # the first run may have begun earlier
            (now if end > len(calls) - LATELY else before).append((kind, n, runs[i + 1][0]))
    return before, now
