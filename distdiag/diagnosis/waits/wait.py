"""One thing that ranks wait for, and whether the calls that have arrived can ever complete together."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import Call, RankState, Snapshot
from distdiag.diagnosis.waits import compatible, messages
from distdiag.diagnosis.waits.compatible import Signature

WORST = ("op", "root", "dtype", "shape")  # the first of these is reported if calls differ in several ways


@dataclass(slots=True, eq=False)
class Wait:
    """One thing that ranks wait for: a collective of a group, or one point-to-point message.

    Attributes:
        key: `(group, seq)` of a collective; `(group, seq or nth, "send"|"recv", rank, peer, tag)` of a message.
        ranks: Ranks that wait in it.
        missing: Members that have not issued it.
        any_of: True if one of `missing` is enough (recv from any source).
        conflict: Why it can never complete although ranks have arrived: op, root, dtype or shape.
        sides: Members with compatible calls, the largest side first; only if `conflict` is set.
        calls: The known calls: of all members that arrived if `conflict` is set, else of those that wait in it.
        died: Members that ended inside it.
    """

    key: tuple
    ranks: list[int] = field(default_factory=list)
    missing: frozenset[int] = frozenset()
    any_of: bool = False
    conflict: str | None = None
    sides: tuple[frozenset[int], ...] = ()
    calls: dict[int, Call] = field(default_factory=dict)
    died: tuple[int, ...] = ()

    @property
    def p2p(self) -> bool:
        return len(self.key) > 2

    @property
    def group(self) -> str:
        return self.key[0]

    @property
    def seq(self) -> int:
        return self.key[1]


def call_at(state: RankState | None, group: str, seq: int) -> Call | None:
    """Return the rank's call of collective `seq` in `group`; None if it is not known, or not any more."""
    newest_first = (state.blocked, *reversed(state.calls)) if state is not None else ()
    same = (c for c in newest_first if c is not None and (c.group, c.seq) == (group, seq) and not c.p2p)
    return next(same, None)


def calls_until(state: RankState, here: Call | None) -> list[Call]:
    """Return the calls of a rank up to this one and with it, oldest first; all that are known of None."""
    if here is None:
        return [*state.calls]
    names = [messages.name(call) for call in state.calls]
    newest = next((i for i in reversed(range(len(names))) if names[i] == messages.name(here)), len(names))
    return [*state.calls[:newest], here]


def by_python(state: RankState, call: Call) -> bool:
    """True if a line of Python has made this call; DDP makes its own in C++."""
    return any((c.group, c.seq) == (call.group, call.seq) for c in state.calls)


def conflict_at(snapshot: Snapshot, group: str, seq: int) -> str | None:
    """Return why a collective that every member has issued cannot complete: op, root, dtype or shape; None if it can."""
    wait = Wait((group, seq))
    find_conflict(snapshot, wait)
    return wait.conflict


def differ(snapshot: Snapshot, a: Call, b: Call) -> bool:
    """True if two calls of one group cannot be the same collective."""
    both = compatible.signature(a), compatible.signature(b)
    return compatible.conflict(*both, _backend(snapshot, a.group)) is not None


def _backend(snapshot: Snapshot, name: str) -> str:
    group = snapshot.groups.get(name)
    return group.backend.rpartition(":")[2] if group is not None else ""


def find_conflict(snapshot: Snapshot, w: Wait) -> None:
    """Set `conflict` and `sides` if the calls that have arrived cannot complete together."""
    if w.p2p:
        _find_message_conflict(snapshot, w)
        return
    group = snapshot.groups[w.group]
    by_signature: dict[Signature, list[int]] = {}
    calls: dict[int, Call] = {}
    for q in group.ranks:
        if q in w.missing:
            continue
        call = w.calls.get(q) or call_at(snapshot.ranks.get(q), w.group, w.seq)
        if call is not None:
            calls[q] = call
            by_signature.setdefault(compatible.signature(call), []).append(q)
    if not w.missing and len(calls) == len(group.ranks) > 1 and compatible.splits_disagree(calls.values()):
        w.conflict, w.sides, w.calls = "shape", tuple(frozenset((q,)) for q in calls), calls
        return
    if len(by_signature) < 2:
        return
    backend = _backend(snapshot, w.group)
    sides: list[tuple[Signature, list[int]]] = []
    causes: set[str] = set()
    for sig, members in sorted(by_signature.items(), key=lambda kv: (-len(kv[1]), kv[1][0])):
        for other, ranks in sides:
            cause = compatible.conflict(sig, other, backend)
            if cause is None:
                ranks.extend(members)
                break
            causes.add(cause)
        else:
            sides.append((sig, list(members)))
    if len(sides) < 2:
        return
    sides.sort(key=lambda side: (-len(side[1]), side[1][0]))
    w.conflict = next(c for c in WORST if c in causes)
    w.sides = tuple(frozenset(members) for _, members in sides)
    w.calls = calls


def _find_message_conflict(snapshot: Snapshot, w: Wait) -> None:
    """Mark a send and its recv that differ in length or dtype.

    Both ends must be in it, waiting or dead. On a device, a small send completes without its recv: there, the recv waits alone.
    A device compares no types, only bytes.
    """
    rank, peer = w.key[3], w.key[4]
    if w.missing or peer is None or rank not in w.calls:
        return
    here = w.calls[rank]
    there = other_end_of(snapshot, w) if here.on_device else _waits_in_other_end(snapshot, w)
    if there is None or (here.on_device and here.bytes == there.bytes):
        return
    sizes = compatible.elements(here), compatible.elements(there)
    types = compatible.dtype_name(here.dtype), compatible.dtype_name(there.dtype)
    if None in sizes or None in types or (sizes[0] == sizes[1] and types[0] == types[1]):
        return
    w.conflict = "shape" if sizes[0] != sizes[1] else "dtype"
    w.sides = (frozenset((rank,)), frozenset((peer,)))
    w.calls = {rank: here, peer: there}


def _waits_in_other_end(snapshot: Snapshot, w: Wait) -> Call | None:
    """Return the call that the peer's host waits in, if it is the other end of this message."""
    group, nth, direction, rank, peer, tag = w.key
    b = snapshot.ranks[peer].blocked if peer in snapshot.ranks else None
    if b is None or not b.p2p or (b.group, b.tag, b.peer, b.nth) != (group, tag, rank, nth):
        return None
    return b if messages.direction_of(b) == messages.OPPOSITE[direction] else None


def other_end_of(s: Snapshot, wait: Wait) -> Call | None:
    """Return the matching call of the message that ranks wait in; None if it is not known, or the source is any rank."""
    rank, peer = wait.key[3], wait.key[4]
    call = wait.calls.get(rank)
    return None if call is None or peer is None else messages.other_end(s.ranks.get(peer), rank, call, wait.seq)


def last_wait(state: RankState) -> Call | None:
    """Return what a rank waits in, or waited in last until it failed."""
    if state.blocked is not None:
        return state.blocked
    for call in reversed(state.calls):
        if call.failed or call.completed_s is None:
            return call
    for group, seq in state.enqueued.items():
        if state.completed.get(group, seq) < seq:
            return Call(op="", group=group, seq=state.completed[group] + 1)
    return None
