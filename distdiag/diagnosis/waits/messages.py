"""Decides whether the other end of a send or recv has been issued, by counting messages; contents are never read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Snapshot

_ANY = ("any", "-1", "-2", "None")
OPPOSITE = {"send": "recv", "recv": "send"}
_STEPS = 8  # in which each rank has made equally many messages: their number is no chance


def direction_of(call: Call) -> str:
    return "send" if call.op.endswith("send") else "recv"


def count(st: RankState, direction: str, peer: int | None, tag: int, group: str) -> int:
    """Return how many such messages a rank has issued; `peer` None counts receives from any source."""
    if peer is not None:
        return st.p2p_issued.get(f"{direction}:{peer}:{tag}:{group}", 0)
    return sum(st.p2p_issued.get(f"{direction}:{a}:{tag}:{group}", 0) for a in _ANY)


def none_left_out(peer: RankState | None, rank: int, call: Call) -> bool:
    """True if the peer has made its end of such messages of `rank`, and all others, equally often in each of its optimizer steps.

    In the middle of a step, of some of its messages there would be one more.
    """
    if peer is None or peer.step < _STEPS or not count(peer, OPPOSITE[direction_of(call)], rank, call.tag, call.group):
        return False
    return all(made % peer.step == 0 for made in peer.p2p_issued.values())


def open_to(st: RankState, *peers: int | None) -> Iterator[Call]:
    """Yield the open messages of a rank to these peers: its host waits in one, or it was issued and not completed."""
    open_calls = (st.blocked, *(c for c in st.calls if c.completed_s is None))
    return (c for c in open_calls if c is not None and c.p2p and c.peer in peers)


def _in_flight(st: RankState, rank: int, call: Call) -> bool:
    """True if a rank has the other end of a message of `rank` open."""
    wanted = OPPOSITE[direction_of(call)], call.tag, call.group
    peers = (rank, None) if wanted[0] == "recv" else (rank,)
    return any((direction_of(c), c.tag, c.group) == wanted for c in open_to(st, *peers))


def held_up(st: RankState, call: Call | None) -> bool:
    """True if the rank's host has issued `call`, but its device is still in an earlier operation.

    Known only while the host waits for the device. An operation delays what was issued after the host left it, or its
    `wait()`: from then on the stream depends on it.
    """
    head = st.blocked
    if head is None or not head.on_device or call is None or call.entered_s is None or head.left_s is None:
        return False
    same = name(head) == name(call)
    return not same and head.left_s <= call.entered_s


def name(c: Call) -> tuple[str | int | None, ...]:
    """Return the fields that two records of one operation of a rank share."""
    return c.group, c.seq, *((direction_of(c), c.peer, c.tag, c.nth) if c.p2p else ())


def other_end(peer: RankState | None, rank: int, call: Call, nth: int | None = None) -> Call | None:
    """Return the peer's call that matches the `nth` such message of `rank`, by default its newest; None if none is known."""
    wanted = rank, call.tag, call.group, OPPOSITE[direction_of(call)]
    made = (c for c in reversed(peer.calls) if c.p2p and nth in (None, c.nth)) if peer is not None else ()
    return next((c for c in made if (c.peer, c.tag, c.group, direction_of(c)) == wanted), None)


def other_end_issued(st: RankState, peer: RankState, call: Call, nth: int) -> bool:
    """True if `peer` has issued the other end of the `nth` message of `st`, made by `call`.

    Decided by counting, as messages of one pair and tag match in order. With a recv from any source the count is a range: its
    upper end is used only if the other end is seen in flight (a message completes only together with its other end).
    """
    if peer.life == Life.STOPPED:
        return False
    direction = direction_of(call)
    if peer.queued and held_up(peer, other_end(peer, st.rank, call, nth)):
        return False
    there = count(peer, OPPOSITE[direction], st.rank, call.tag, call.group)
    receiver = peer if direction == "send" else st
    anys = count(receiver, "recv", None, call.tag, call.group)
    if direction == "send":
        if there >= nth:
            return True
        b = peer.blocked
        possible = there + anys >= nth or (b is not None and b.p2p and b.peer is None)
    else:
        if there >= nth + anys:
            return True
        possible = there >= nth
    return possible and _in_flight(peer, st.rank, call)


def any_other_end(snapshot: Snapshot, st: RankState, call: Call, among: Iterable[int]) -> bool:
    """True if any of `among` has issued a message for this recv from any source."""
    anys = count(st, "recv", None, call.tag, call.group)
    for q in among:
        peer = snapshot.ranks.get(q)
        if q == st.rank or peer is None or peer.life == Life.STOPPED:
            continue
        sent = count(peer, "send", st.rank, call.tag, call.group)
        here = count(st, "recv", q, call.tag, call.group)
        if sent > here + max(anys - 1, 0):
            return True
        if sent > here and _in_flight(peer, st.rank, call):
            return True
    return False
