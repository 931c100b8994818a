"""Evidence from the order of a rank's own calls: who broke the sequence that it had repeated until then.

A training loop repeats the same calls in the same order. Some ranks wait for each other in a cycle, and one of them recently made
a transition from one call to another for the first time: it left a call out, or made it twice. Stages of a pipeline make
different calls: no histories of two ranks can be compared there, as `divergence` does.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from distdiag.diagnosis.culprit import backward, callers
from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.culprit.paths import Condition, Pair, Way, conditions_between, left_loop, short_rounds
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState
from distdiag.diagnosis.text.conditions import decision_advice, left_text
from distdiag.diagnosis.text.phrases import at, op_at, op_text
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import calls_until

LATELY = 32  # calls; the cycle closes some calls after the rank broke its sequence
HISTORY = 48  # minimum of earlier calls
ROUNDS = 4  # earlier passages or rounds, at least
LOOP_ADVICE = "loop over a sorted list, not over a set or a directory listing, whose order differs between processes"
_TURNS = f"c?(mc){{{ROUNDS},}}"  # a message and then a collective, in each round
KINDS = 0.25  # most distinct transitions per transition; above this there is no pattern


def pattern(case: Case) -> Testimony | None:
    """Accuse the one member of a cycle that recently broke its own sequence while all other ranks kept theirs."""
    others = [state for rank, state in case.states.items() if rank not in case.incident.members]
    own = {state.rank for state in others if _has_departed(state) and _is_awaited(state, case)}
    rank = departed((case.states[r] for r in case.compared), (state for state in others if state.rank not in own))
    if rank is None or (own and not _is_awaited(case.states[rank], case)):
        return None
    kept = f"unlike {rank_list(set(case.compared) - {rank})}" if own else "the others kept theirs"
    text = f"; {rank_list([rank])} has left the order of its earlier calls, {kept}"
    turn = _turn(case.states[rank].calls)
    if turn is None:
        return Testimony(ranks=(rank,), text=text)
    if turn.made.site == turn.due.site and turn.made.peer == turn.due.peer and not turn.again:
        rose = f"; the tag of its {op_at(turn.made)} rose more, or less, than in {turn.times:,} earlier messages, the others' as always"
        return Testimony(ranks=(rank,), text=rose)
    # what it left out has led to the call that it made in each round before: what leads to that one is not the reason
    ends = turn.after if turn.left_out else turn.made, turn.due
    made, due = (callers.stack_at(call.site, case.states[rank], case.source) for call in ends)
    changed = Pair(changed=True)
    conditions = tuple(
        short_rounds(made, case.source) if turn.again else conditions_between(made, due, case.source, changed)
    )
    text += f": after {op_at(turn.after)} it made {op_at(turn.made)}, where {op_at(turn.due)} had followed each of the last {turn.times:,} times"
    if not turn.left_out and not turn.returned and {c.way for c in conditions} != {Way.ALONE}:
        # it has come to the end of its loop, or maybe of its epoch
        left = left_loop(made, due, case.source)
        head, advice = (left_text((rank,), turn.due), decision_advice(left[0], (rank,), turn.due)) if left else ("", "")
        return Testimony(ranks=(rank,), head=head, text=text, conditions=tuple(left), advice=advice)
    sends = all(call is not None and call.op.endswith("send") for call in case.calls.values())
    if sends and turn.again and not conditions:  # what was due may come next
        return Testimony(
            ranks=(rank,), head=f"rank {rank} made {op_at(turn.made)} again before {op_at(turn.due)}", text=text,
            advice="let no rank wait in a send while its peer does: use isend or batch_isend_irecv, or receive before the next "
            f"send; see why rank {rank} now makes {op_at(turn.made)} more often in a row",
        )  # fmt: skip
    rest = case.states[rank].user_stack
    if turn.left_out and not conditions and (found := backward.left((rank,), rest, due, turn.due, case.source)):
        return replace(found, text=text + found.text)
    did, call = ("left out", turn.due) if turn.left_out else ("alone made", turn.made)
    return Testimony(
        ranks=(rank,), head=f"rank {rank} {did} {op_at(call)}", text=text, conditions=conditions, advice=_advice(rank, turn, conditions)
    )  # fmt: skip


def _is_awaited(state: RankState, case: Case) -> bool:
    """True if a rank left out a collective in which a rank waits that kept its order.

    Several ranks may skip such a call together, each in its own group.
    """
    turn = _turn(state.calls)
    if turn is None or not turn.left_out or turn.due.p2p or turn.due.site is None:
        return False
    blocked = ((q, q.blocked) for q in case.states.values() if q.blocked is not None and q.blocked.site is not None)
    due = turn.due.op, turn.due.group, turn.due.site.key
    there = (q for q, c in blocked if c.site is not None and (c.op, c.group, c.site.key) == due)
    return any(_has_departed(q) is False for q in there)


def _advice(rank: int, turn: Turn, conditions: Sequence[Condition]) -> str:
    if turn.left_out:
        if len(conditions) == 1:
            return decision_advice(conditions[0], (rank,), turn.due)
        return f"find why rank {rank} left out {op_at(turn.due)}"
    if not conditions:
        return f"make {op_at(turn.made)} on all ranks that it concerns, or on none"
    condition = f"`{conditions[0].text}`{at(conditions[0].site)}"
    if not turn.made.p2p or turn.made.peer is None:
        return f"let all ranks run what {condition} keeps to rank {rank}, or none"
    return (
        f"see whether rank {turn.made.peer} makes the other end of that message when {condition} holds on rank {rank}: if never, let it, "
        f"or let rank {rank} leave the message out; if later, use isend or irecv, or make it after what the others wait for"
    )


def groups_in_turn(case: Case) -> Testimony | None:
    """Return that the members of a cycle are in one call with different groups, and that all have made it with each group before."""
    calls = [call for call in case.calls.values() if call is not None]
    sites, groups = {call.site for call in calls}, {call.group for call in calls}
    site = sites.pop() if len(sites) == 1 else None
    if site is None or len(groups) < 2 or not case.states.keys() >= set(case.compared):
        return None
    now = {(call.group, call.seq) for call in calls}
    made = ((c for c in case.states[q].calls if c.site == site and (c.group, c.seq) not in now) for q in case.compared)
    if not all(groups <= {c.group for c in earlier} for earlier in made):
        return None
    return Testimony(
        name=Reason.ORDER,
        text="; each has made this call with each of these groups before: they take the groups in a different order, or one leaves one out",
        advice=f"take the groups{at(site)} in the same order on all ranks: {LOOP_ADVICE}",
    )


def message_later(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return that a rank of a cycle is in a collective before its end of a message, where both ends came first in each round before."""
    waits, members = case.incident.waits if not ranks else (), case.incident.members
    collectives = {r: w.calls[r] for w in waits if not w.p2p for r in w.ranks if r in members}
    for waiting, call in ((r, c) for w in waits if w.p2p for r, c in w.calls.items()):
        made = collectives.get(-1 if call.peer is None else call.peer)
        if made is None or call.peer is None or waiting not in case.states:
            continue
        mine = _rounds(case.states[call.peer], waiting, call.tag, made)
        theirs = _rounds(case.states[waiting], call.peer, call.tag, made)
        turns = ["".join("m" if c.p2p else "c" for c in calls) for calls in (mine, theirs)]
        if not all(re.fullmatch(_TURNS + now, turn) for now, turn in zip("cm", turns, strict=True)):
            continue
        end, rounds = next(c for c in reversed(mine) if c.p2p), min(turns[0].count("m"), turns[1].count("m") - 1)
        who, op = f"rank {call.peer}", compatible.op_name(made.op)
        return Testimony(
            text=f"; in each of the last {rounds:,} rounds {who} made {op_at(end)} and then a {op}, and in this one the {op} first",
            advice=f"let {who} make that {op_at(end)} before the {op}, as in each round before: rank {waiting} makes the {op} only after its {call.op}",
        )  # fmt: skip
    return None


def called_before(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return where a rank of a cycle that waits for a message made its part of the collective in which another member waits for it."""
    by_message = {r for w in case.incident.waits if w.p2p for r in w.ranks}
    for wait in case.incident.waits if not ranks else ():
        rank, other = min(wait.missing & by_message & case.states.keys(), default=-1), min(wait.calls, default=-1)
        call, last = wait.calls.get(other), case.call_before(wait, rank)
        if call is None or last is None or last.site is None or other not in case.incident.members:
            continue
        if last.op != call.op:
            continue
        op, who, state = compatible.op_name(call.op), f"rank {rank}", case.states[rank]
        there = callers.stack_at(last.site, state, case.source)
        found = conditions_between(state.user_stack, there, case.source, Pair(changed=True))
        past = [f"`{c.text}`{at(c.site)}" for c in found if c.way is Way.SKIPPED]
        led = f"{' or '.join(past)}, or a `continue` or `return`," if past else "a condition, `continue` or `return`"
        return Testimony(
            text=f"; {who} made {op} #{last.seq:,} of that group{at(last.site)}",
            advice=f"rank {other} waits in {op_text(call)}, which {who} has not called: see whether {led} leads {who} past the "
            f"{op}{at(last.site)}, or rank {other} makes one more than {who}; else whether {who} makes one message more than its peer",
        )  # fmt: skip
    return None


def _rounds(state: RankState, peer: int, tag: int, made: Call) -> list[Call]:
    """Return a rank's messages with a peer and its collectives of one kind, with the call that it is in."""
    return [
        c for c in calls_until(state, state.blocked)
        if ((c.peer, c.tag) == (peer, tag) if c.p2p else (c.op, c.group) == (made.op, made.group)) and not c.other_thread
    ]  # fmt: skip


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


class _Order:
    """The order of a rank's calls.

    Attributes:
        kinds: Of each call: operation, group, peer, site, and the tag's increment since the last call of its kind.
        runs: (kind, repetitions, index of the first) of equal calls in a row.
        before, now: The (kind, repetitions, next kind) transitions, earlier and recent; the first run may have begun earlier.
        most: How often each call was made in a row, at most; of calls that were made often enough.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.kinds: list[Any] = []
        tags: dict[Any, int] = {}
        for c in calls:
            kind = (c.op, c.group, c.peer, c.site.key if c.site else None)
            self.kinds.append((kind, c.tag - tags.get(kind, c.tag)))
            tags[kind] = c.tag
        self.runs: list[tuple[Any, int, int]] = []
        for kind, same in itertools.groupby(range(len(calls)), self.kinds.__getitem__):
            first, *more = same
            self.runs.append((kind, 1 + len(more), first))
        passages = [(kind, n, then, start + n) for (kind, n, start), (then, *_) in itertools.pairwise(self.runs[1:])]
        self.recent = len(calls) - LATELY
        self.before = [(kind, n, then) for kind, n, then, end in passages if end <= self.recent]
        self.now = [(kind, n, then) for kind, n, then, end in passages if end > self.recent]
        often = (kind for kind, n in Counter(kind for kind, _, _ in self.before).items() if n >= ROUNDS)
        self.most = {kind: max(n for k, n, _ in self.before if k == kind) for kind in often}


def _turn(calls: Sequence[Call]) -> Turn | None:
    """Return where a rank first left the order of its calls: by a call that had never followed the one before it, or by one
    repetition more than ever.

    None if several calls had followed, so that it is not clear which was due; or if the call that it made is an old one that had
    never followed the due one.
    """
    order = _Order(calls)
    kinds, before, known = order.kinds, order.before, {k for k, _, _ in order.before}
    for (kind, n, start), (following, *_) in itertools.pairwise([*order.runs, (None, 0, 0)]):
        again = 0 < order.most.get(kind, 0) < n  # it made the call again, where another was due
        if start + n <= order.recent or not (again or (kind, n, following) in set(order.now) - set(before)):
            continue
        at_made = start + order.most[kind] if again else start + n
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
    found = {state.rank: _has_departed(state) for state in members}
    odd = [rank for rank, new in found.items() if new]
    return odd[0] if len(odd) == 1 and None not in found.values() and not any(map(_has_departed, others)) else None


def _has_departed(state: RankState) -> bool | None:
    """True if its recent calls have a transition that it never made before, or its last round has other calls than every earlier
    one; None if there is no pattern.
    """
    order = _Order(state.calls)
    before = order.before
    if len(before) < ROUNDS or sum(n for _, n, _ in before) < HISTORY or not _repeat(before):
        return None
    kind, n, _ = order.runs[-1]
    if not set(order.now) <= set(before) or 0 < order.most.get(kind, 0) < n:
        return True
    # the calls between the times that it came to its newest call; the first round may have begun earlier
    starts = [start for k, _, start in order.runs if k == order.kinds[-1]]
    rounds = [frozenset(Counter(order.kinds[a:b]).items()) for a, b in itertools.pairwise(starts)]
    return _repeat(rounds[:-1]) and rounds[-1] not in rounds[:-1]


def _repeat(seen: Sequence[Any]) -> bool:
    return len(seen) >= ROUNDS and len(set(seen)) <= max(2, KINDS * len(seen))
