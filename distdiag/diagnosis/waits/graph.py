"""The wait-for graph of one snapshot: which rank waits for which, and which ranks are stuck for good.

A rank waits in a collective (G, s) for every member of G that has not issued s, and in the k-th send to a peer for that
peer's k-th recv from it (and the reverse); a recv from any source waits for any one of its candidates. A living rank
that is not blocked may still do anything; a blocked one continues once its waits are satisfied. A rank that no such
continuation frees is stuck for good: in a cycle, behind a rank that is gone or stopped, or in a collective that ranks entered
with different operations. That is a proof, not a timeout (a least fixpoint; M. Chandy, J. Misra, L. Haas, "Distributed
deadlock detection", 1983, for the AND and OR models).

Pure and linear in ranks + waits: members of one collective share one `Wait`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import DEAD, Call, Life, RankState, Snapshot
from distdiag.diagnosis.waits import messages
from distdiag.diagnosis.waits.wait import Wait, call_at, differ, find_conflict
from distdiag.terms.operations import synchronizes


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The waits in a snapshot, and the ranks that are stuck; made by `build`.

    Attributes:
        waits: All operations that ranks wait in, and those in which ranks died.
        of_rank: The waits of each blocked rank: one if the host waits, several in a dump (one per group).
        stuck: Blocked ranks that no continuation of the others can free: proved.
        gone: Ranks that are dead or stopped: they issue nothing more.
        sinks: Ranks that cause the delay: others wait for them, and they are neither blocked nor gone. Includes ranks of unknown
            state (life missing, silent, starting).
        unknown: Blocked ranks whose wait is not known (group or number not recorded).
    """

    waits: tuple[Wait, ...]
    of_rank: dict[int, tuple[Wait, ...]]
    stuck: frozenset[int]
    gone: frozenset[int]
    sinks: tuple[int, ...]
    unknown: frozenset[int]
    _waits_for: dict[int, list[Wait]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # asked for each of thousands of ranks
        for wait in self.waits:
            for q in wait.missing.union(*wait.sides) if wait.ranks else ():
                self._waits_for.setdefault(q, []).append(wait)

    def victims_of(self, ranks: int | Iterable[int]) -> frozenset[int]:
        """Return the blocked ranks that wait, directly or through others, for any of `ranks` (which are left out)."""
        start = {ranks} if isinstance(ranks, int) else set(ranks)
        reached: set[int] = set(start)
        seen: set[tuple[int, frozenset[int] | None]] = set()
        todo = deque(start)
        while todo:
            q = todo.popleft()
            for wait in self._waits_for.get(q, ()):
                side = next((s for s in wait.sides if q in s), None)  # its own side does not wait for it
                if (id(wait), side) in seen:
                    continue
                seen.add((id(wait), side))
                for rank in wait.ranks:
                    if rank not in reached and (side is None or rank not in side):
                        reached.add(rank)
                        todo.append(rank)
        return frozenset(reached - start)


def build(snapshot: Snapshot) -> WaitGraph:
    """Return the wait-for graph of a snapshot.

    Dumps (`source == "dumps"`) show nothing about the host: a rank counts as waiting for the oldest incomplete collective
    that it issued in each group.
    """
    ranks = snapshot.ranks
    gone = frozenset(rank for rank, state in ranks.items() if state.life in DEAD or state.life == Life.STOPPED)
    waits: dict[tuple, Wait] = {}
    of_rank: dict[int, tuple[Wait, ...]] = {}
    unknown: set[int] = set()
    dumps = snapshot.source == "dumps"
    completed_by_any: dict[str, int] = {}
    for state in ranks.values():
        for group, seq in state.completed.items():
            completed_by_any[group] = max(completed_by_any.get(group, 0), seq)
    for rank, state in ranks.items():
        if rank in gone:
            last = _last_call(state)
            if last is not None and (wait := _wait_for(snapshot, state, last, waits)) is not None:
                wait.died = (*wait.died, rank)
                wait.calls[rank] = last
            continue
        mine: list[Wait] = []
        for call in _pending(state) if dumps else _blocked_in(snapshot, state, completed_by_any):
            wait = _wait_for(snapshot, state, call, waits)
            if wait is None:
                unknown.add(rank)
                continue
            wait.ranks.append(rank)
            wait.calls[rank] = call
            mine.append(wait)
        if mine:
            of_rank[rank] = tuple(mine)
    for wait in waits.values():
        if not wait.any_of:
            find_conflict(snapshot, wait)
    stuck, free = _fixpoint(ranks, gone, waits.values(), of_rank)
    awaited = {q for wait in waits.values() if not free.isdisjoint(wait.ranks) for q in wait.missing}
    sinks = tuple(sorted((awaited & free) - of_rank.keys() - unknown))
    return WaitGraph(tuple(waits.values()), of_rank, stuck, gone, sinks, frozenset(unknown))


# -- what a rank waits in ------------------------------------------------------------------------------------------


def _blocked_in(snapshot: Snapshot, state: RankState, completed_by_any: Mapping[str, int]) -> Iterator[Call]:
    call = state.blocked
    if call is None:
        return
    seq = call.seq or 0
    late = call.on_device and completed_by_any.get(call.group, 0) >= seq > 0 and synchronizes(call.op)
    if late and _completed_elsewhere(snapshot, call, seq):
        return  # this rank's counters are late: no rank completes it before all have arrived
    if not call.p2p and state.completed.get(call.group, 0) >= seq > 0:
        return  # completed between two reads of the page
    yield call


def _completed_elsewhere(snapshot: Snapshot, call: Call, seq: int) -> bool:
    """True if another rank has completed this very collective.

    A call that does not match it may get through alone: NCCL's kernel for 4 bytes needs only the first packet of a larger one.
    """
    for other in snapshot.ranks.values():
        if other.completed.get(call.group, 0) >= seq:
            there = call_at(other, call.group, seq)
            if there is None or not there.op or not call.op or not differ(snapshot, call, there):
                return True
    return False


def _last_call(state: RankState) -> Call | None:
    """Return the call that a rank was in, or about to enter, when it died; None if it ended outside of any."""
    if state.life not in (Life.CRASHED, Life.KILLED):
        return None
    call = state.blocked or (state.calls[-1] if state.calls else None)
    return call if call is not None and call.completed_s is None else None


def _pending(state: RankState) -> Iterator[Call]:
    """Yield the oldest collective of each group, and message to each peer, in flight in a dump."""
    pending = [call for call in state.calls if call.completed_s is None]
    known = {(call.group, call.seq): call for call in pending if not call.p2p}
    for group, issued in state.enqueued.items():
        head = state.completed.get(group, 0) + 1
        if head <= issued:
            yield known.get((group, head)) or Call(op="", group=group, seq=head)
    heads: dict[tuple, Call] = {}
    for call in sorted(pending, key=lambda call: call.nth or 0):
        if call.p2p:
            heads.setdefault((call.op, call.peer, call.tag, call.group), call)
    yield from heads.values()


def _wait_for(snapshot: Snapshot, state: RankState, call: Call, waits: dict[tuple, Wait]) -> Wait | None:
    """Return the shared wait of a call; None if it is not known whom it waits for."""
    if (group := snapshot.groups.get(call.group)) is not None and group.unfollowed:
        return None
    if call.p2p:
        return _message(snapshot, state, call, waits)
    if call.seq is None:
        return None
    key = (call.group, call.seq)
    wait = waits.get(key)
    if wait is None:
        if group is None:
            return None
        missing = [q for q in group.ranks if not _issued(snapshot.ranks.get(q), call.group, call.seq)]
        wait = waits[key] = Wait(key, missing=frozenset(missing))
    if state.rank in wait.missing:  # its counters were read before its call
        wait.missing -= {state.rank}
    return wait


def _issued(state: RankState | None, group: str, seq: int) -> bool:
    if state is None:
        return False
    b = state.blocked  # written before the call, the counter moves inside it
    entered = b.seq or 0 if b is not None and b.group == group and not b.p2p else 0
    if max(state.enqueued.get(group, 0), entered) < seq:
        return False
    # a stopped process moves no data either, unless it was through already
    if state.life == Life.STOPPED and state.completed.get(group, 0) < seq:
        return False
    return not state.queued or not messages.held_up(state, call_at(state, group, seq))


def _message(snapshot: Snapshot, state: RankState, call: Call, waits: dict[tuple, Wait]) -> Wait | None:
    """Return the wait of one end of a message for the other."""
    direction = messages.direction_of(call)
    nth = call.nth or messages.count(state, direction, call.peer, call.tag, call.group)
    if call.peer is None:
        group = snapshot.groups.get(call.group)
        among = frozenset(group.ranks if group is not None else ()) - {state.rank}
        if not among:
            return None
        here = messages.any_other_end(snapshot, state, call, among)
        missing, any_of = (frozenset() if here else among), not here
    elif nth:
        peer = snapshot.ranks.get(call.peer)
        here = peer is not None and messages.other_end_issued(state, peer, call, nth)
        missing, any_of = (frozenset() if here else frozenset((call.peer,))), False
    else:
        return None
    key = (call.group, nth or 1, direction, state.rank, call.peer, call.tag)
    return waits.setdefault(key, Wait(key, missing=missing, any_of=any_of))


def _fixpoint(
    ranks: dict[int, RankState], gone: frozenset[int], waits: Iterable[Wait], of_rank: dict[int, tuple[Wait, ...]]
) -> tuple[frozenset[int], set[int]]:
    """Return (ranks stuck for good, ranks that may continue): grows the second set from the ranks that wait for nothing."""
    left: dict[int, int] = {}  # by id of wait: arrivals still needed
    needs: dict[int, list[Wait]] = {}
    known: set[int] = set(ranks)
    for wait in waits:
        left[id(wait)] = 1 if wait.any_of else len(wait.missing)
        for q in wait.missing:
            needs.setdefault(q, []).append(wait)
            known.add(q)
    to_come = {rank: len(ws) for rank, ws in of_rank.items()}
    free = {rank for rank in known if rank not in gone and rank not in of_rank}
    todo = deque(free)

    def satisfied(wait: Wait) -> None:
        for rank in wait.ranks:
            to_come[rank] -= 1
            if to_come[rank] == 0 and rank not in free:
                free.add(rank)
                todo.append(rank)

    for wait in waits:
        if wait.conflict is None and left[id(wait)] == 0:
            satisfied(wait)
    while todo:
        for wait in needs.get(todo.popleft(), ()):
            left[id(wait)] -= 1
            if left[id(wait)] == 0 and wait.conflict is None:
                satisfied(wait)
    return frozenset(rank for rank in of_rank if rank not in free), free
