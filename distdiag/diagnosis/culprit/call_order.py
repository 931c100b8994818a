"""Evidence from the order of a rank's own calls: who broke the sequence that it had repeated until then.

A training loop repeats the same calls in the same order. Some ranks wait for each other in a cycle, and one of them recently made
a transition from one call to another for the first time: it left a call out, or made it twice. Stages of a pipeline make
different calls: no histories of two ranks can be compared there, as `divergence` does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from distdiag.diagnosis.culprit import callers
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.culprit.parting import Condition, Way, decision_advice, parting, short_rounds
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.phrases import at, op_at

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
    text = f"; {rank_list([rank])} has left the order of its earlier calls, the others kept theirs"
    turn = _turn(case.states[rank].calls)
    if turn is None:
        return Testimony(ranks=(rank,), text=text)
    if turn.made.site == turn.due.site and turn.made.peer == turn.due.peer and not turn.again:
        rose = f"; the tag of its {op_at(turn.made)} rose more, or less, than in {turn.times:,} earlier messages, the others' as always"
        return Testimony(ranks=(rank,), text=rose)
    made, due = (callers.stack_at(call.site, case.states[rank], case.source) for call in (turn.made, turn.due))
    conditions = tuple(short_rounds(made, case.source) if turn.again else parting(made, due, case.source, changed=True))
    text += f": after {op_at(turn.after)} it made {op_at(turn.made)}, where {op_at(turn.due)} had always followed ({turn.times:,} times)"
    if not turn.left_out and not turn.returned and {c.way for c in conditions} != {Way.ALONE}:
        return Testimony(ranks=(rank,), text=text)  # it may have come to the end of its loop, or of its epoch
    did, call = ("left out", turn.due) if turn.left_out else ("alone made", turn.made)
    return Testimony(
        ranks=(rank,), head=f"rank {rank} {did} {op_at(call)}", text=text, conditions=conditions, advice=_advice(rank, turn, conditions)
    )  # fmt: skip


def _advice(rank: int, turn: Turn, conditions: Sequence[Condition]) -> str:
    if turn.left_out:
        known = len(conditions) == 1
        return (
            decision_advice(conditions[0], (rank,), turn.due)
            if known
            else f"find why rank {rank} left out {op_at(turn.due)}"
        )
    if not conditions:
        return f"make {op_at(turn.made)} on all ranks that it concerns, or on none"
    half = ": each message needs its other end" if turn.made.p2p else ""
    return f"let all ranks run what `{conditions[0].text}`{at(conditions[0].site)} keeps to rank {rank}, or none{half}"


class Turn(NamedTuple):
    """Where a rank left the order of its calls.

    Attributes:
        after, made: Two calls of which the second had never followed the first.
        due: The call that had always followed, `times` times.
        left_out: The call made had followed the due one; else it is new.
        returned: The due call has followed since.
    """

    after: Call
    made: Call
    due: Call
    times: int
    left_out: bool
    returned: bool

    @property
    def again(self) -> bool:
        return self.made.site == self.after.site


def _turn(calls: tuple[Call, ...]) -> Turn | None:
    """Return the first transition that a rank had never made before; None if it is not clear what was due, or done instead."""
    kinds, runs = _with_tags(calls), _runs(calls)
    before, now = _passages(calls)
    known, most = {k for k, _, _ in before}, _most(before)
    for (kind, n, start), (following, *_) in itertools.pairwise([*runs, (None, 0, 0)]):
        again = 0 < most.get(kind, 0) < n  # it made the call again, where another was due
        if start + n <= len(calls) - LATELY or not (again or (kind, n, following) in set(now) - set(before)):
            continue
        at_made = start + most[kind] if again else start + n
        made = kind if again else following
        followed = Counter(c for k, _, c in before if k == kind)
        left_out = any(k in followed and c == made for k, _, c in before)
        if len(followed) != 1 or (made in followed and not again) or (made in known and not left_out):
            return None
        ((due, times),) = followed.items()
        at_due = len(kinds) - 1 - kinds[::-1].index(due)
        return Turn(calls[at_made - 1], calls[at_made], calls[at_due], times, left_out, at_due > at_made)
    return None


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
    kind, n, _ = _runs(st.calls)[-1]
    return bool(set(now) - set(before)) or 0 < _most(before).get(kind, 0) < n or _other_round(st.calls)


def _most(passages: Sequence[Any]) -> dict[Any, int]:
    """Return how often each call was made in a row, at most; of calls that were made often enough."""
    times = Counter(kind for kind, _, _ in passages)
    return {kind: max(n for k, n, _ in passages if k == kind) for kind, often in times.items() if often >= ROUNDS}


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


def _runs(calls: tuple[Call, ...]) -> list[tuple[Any, int, int]]:
    """Return (call, repetitions, index of the first) of equal calls in a row."""
    runs: list[tuple[Any, int, int]] = []
    start = 0
    for kind, same in itertools.groupby(_with_tags(calls)):
        n = sum(1 for _ in same)
        runs.append((kind, n, start))
        start += n
    return runs


def _passages(calls: tuple[Call, ...]) -> tuple[list[Any], list[Any]]:
    """Return the (call, repetitions, next call) transitions, earlier and recent; the first run may have begun earlier."""
    before: list[Any] = []
    now: list[Any] = []
    for (kind, n, start), (following, *_) in itertools.pairwise(_runs(calls)[1:]):
        (now if start + n > len(calls) - LATELY else before).append((kind, n, following))
    return before, now
