"""The state that a node's monitor sends to node 0's, as bytes, and how it becomes ranks with node 0's times.

Most of a state is histories, of which most was in the state before. Each item has the number of the state in which it was new, so
that what node 0 knows already is not decoded again, and not sent again to a node 0 that has said so: it names the newest state that
it has read. Any other state may be lost, or replaced by a newer one.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from distdiag.diagnosis.model.snapshot import Group, RankState, Seconds
from distdiag.monitor.windows import Window, Windows

VERSION = 4
MOST_S = 1e10  # a time beyond it is none
MOST_GROUPS = 4096  # of one node
# fields of a rank, with the most items sent
HISTORIES = {"steps": 64, "calls": 16, "memory": 120, "worker_memory": 120, "device_memory": 120}
MOST_FAULTS = 8
# by cause, the newest last
Faults = Annotated[tuple[tuple[str, Annotated[str, Meta(max_length=1000)]], ...], Meta(max_length=MOST_FAULTS)]
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class History(msgspec.Struct, frozen=True, array_like=True):
    """The newest items of one history, oldest first."""

    first: int  # how many items came before
    # of each item the number of the state in which it, or one before it, was new or changed; 32 bits, little-endian
    new_in: bytes
    begins: bytes  # where the item begins in `items`, in the same way, without the oldest items that node 0 knows
    items: bytes  # those items, encoded, one after the other


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one node, as its monitor sees them; times in seconds since `started_unix_s`."""

    version: int = VERSION
    node: int
    number: int  # of this state, increasing
    sender: int = 0  # a random number of the monitor: another one numbers anew
    started_unix_s: float
    written_unix_s: float
    closed: bool = False  # the job is over: this is the last state
    local_world_size: int
    ranks: dict[int, RankState]  # without their histories
    histories: dict[int, dict[str, History]] = {}
    windows: dict[int, Window] = {}
    groups: dict[str, msgspec.Raw]  # encoded: all nodes of a job have the same large ones
    faults: Faults = ()  # what its monitor could not do


@dataclass(frozen=True)
class Heard:
    """A state of another node, with times since this node's run began."""

    node: int
    number: int
    closed: bool
    local_world_size: int
    ranks: dict[int, RankState]
    groups: dict[str, Group]
    faults: Faults = ()
    waits: bool = False  # one of its ranks waited in a collective when it was made


class Sent(NamedTuple):
    """What was sent last of a history."""

    first: int
    items: tuple[Any, ...]
    new_in: list[int]


class Sender:
    """Makes the parts of this node's states."""

    def __init__(self) -> None:
        self.id = secrets.randbits(62)
        self._sent: dict[tuple[int, str], Sent] = {}

    def parts(
        self, number: int, ranks: dict[int, RankState], groups: dict[str, Group], windows: Windows, known: int = 0
    ) -> dict[str, Any]:
        """Return fields of a `NodeState`, without what was in the newest state that node 0 has read (`known`; 0: none)."""
        without = dict.fromkeys(HISTORIES, ())
        return {
            "number": number,
            "sender": self.id,
            "ranks": {q: msgspec.structs.replace(r, **without) for q, r in ranks.items()},
            "histories": {
                q: {n: self._history(number, q, n, found, known) for n in HISTORIES if (found := getattr(r, n))}
                for q, r in ranks.items()
            },
            "windows": {q: windows.of(r) for q, r in ranks.items()},
            "groups": {name: msgspec.Raw(msgspec.msgpack.encode(g)) for name, g in groups.items()},
        }

    def _history(self, number: int, rank: int, name: str, every: tuple[Any, ...], known: int) -> History:
        items = every[-HISTORIES[name] :]
        before = self._sent.get((rank, name)) or Sent(0, (), [])
        gone = next((i for i, item in enumerate(before.items) if item == items[0]), len(before.items))
        pairs = zip(before.items[gone:], items, strict=False)
        same = next((i for i, (old, new) in enumerate(pairs) if old != new), len(before.items) - gone)
        same = min(same, len(items))
        new_in = [*before.new_in[gone : gone + same], *[number] * (len(items) - same)]
        self._sent[rank, name] = Sent(before.first + gone, items, new_in)
        encoded = [msgspec.msgpack.encode(item) for item in items[bisect_right(new_in, known) :]]
        begins = list(accumulate(map(len, encoded[:-1]), initial=0))[: len(encoded)]
        return History(before.first + gone, _packed(new_in), _packed(begins), b"".join(encoded))


def _packed(numbers: list[int]) -> bytes:
    return array("I", numbers).tobytes()


def _unpacked(data: bytes) -> array[int]:
    found = array("I")
    found.frombytes(data)
    return found


class Incomplete(Exception):
    """A state lacks what its sender takes for known: another monitor read it."""


class Known(NamedTuple):
    """What is known of a rank's history: whose numbers these are, the shift of its times, and its newest state's number."""

    sender: int
    by_s: float
    number: int
    first: int
    items: tuple[Any, ...]


class Readings:
    """Makes ranks with times of this node of the states that arrive."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Known] = {}

    def heard(self, x: NodeState, later_s: float) -> Heard:
        """Return a state whose times are `later_s` seconds later.

        Raises:
            Incomplete: it must be sent whole.
            msgspec.MsgspecError, ValueError, RecursionError: a history or a group cannot be read, or a time is out of range.
        """
        ranks = {}
        for q, r in x.ranks.items():
            sent = x.histories.get(q, {})
            found = {name: self._history(x, q, name, sent[name], later_s) for name in HISTORIES if name in sent}
            ranks[q] = msgspec.structs.replace(shifted(r, later_s), **found)
        groups = {name: _group(bytes(raw)) for name, raw in x.groups.items()}
        return Heard(x.node, x.number, x.closed, x.local_world_size, ranks, groups, x.faults)

    def _history(self, x: NodeState, rank: int, name: str, sent: History, by_s: float) -> tuple[Any, ...]:
        new_in, n = _unpacked(sent.new_in), len(sent.new_in) // 4
        left_out = n - len(sent.begins) // 4
        if not 0 < n <= HISTORIES[name] or left_out < 0:
            raise ValueError("a history of another length")
        known, same, old = self._known.get((rank, name)), 0, ()
        decode, move = _items(name)
        if known is not None and known.sender == x.sender:
            gone = sent.first - known.first
            same = bisect_right(new_in, known.number)
            old = known.items[gone : gone + same] if gone >= 0 else ()
            if known.by_s != by_s:  # the offset of the clocks is known better now
                old = tuple([move(item, by_s - known.by_s) for item in old])
        if len(old) != same:  # not what the sender takes for known: begin anew
            same, old = 0, ()
        if same < left_out:
            raise Incomplete
        new: tuple[Any, ...] = ()
        if same < n:
            begin = _unpacked(sent.begins)[same - left_out]
            decoded = decode(_ARRAY + (n - same).to_bytes(2, "big") + sent.items[begin:])
            new = tuple([move(item, by_s) for item in decoded])
        self._known[rank, name] = Known(x.sender, by_s, x.number, sent.first, old + new)
        return old + new


_ARRAY = b"\xdc"  # of msgpack: an array, its length follows in 16 bits


@lru_cache(maxsize=MOST_GROUPS)
def _group(data: bytes) -> Group:
    return msgspec.msgpack.decode(data, type=Group)


@cache
def _items(name: str) -> tuple[Callable[[bytes], list[Any]], Callable[[Any, float], Any]]:
    """Return what decodes items of a history, and what moves the times of one."""
    kind = get_args(get_type_hints(RankState, include_extras=True)[name])[0]
    move = _mover(kind)
    assert move is not None
    return msgspec.msgpack.Decoder(list[kind]).decode, move


def shifted(state: RankState, by_s: float) -> RankState:
    """Return the same state with times counted from an origin `by_s` seconds earlier."""
    move = _mover(RankState)
    assert move is not None
    return move(state, by_s)


@cache
def _mover(kind: Any) -> Callable[[Any, float], Any] | None:
    """Return a function that adds seconds to every time in a value of this type; None if the type holds no time."""
    origin, parts = get_origin(kind), [_mover(part) for part in get_args(kind)]
    if kind == Seconds:
        return _later
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        others = {name: of for name, of in hints.items() if kind not in get_args(of)}  # without the caller of a site
        fields = [(name, of_field) for name, of in others.items() if (of_field := _mover(of)) is not None]
        return _with_fields(fields) if fields else None
    move = next((part for part in parts if part is not None), None)
    if move is None:
        return None
    if origin in (Union, UnionType):
        return lambda value, by_s: None if value is None else move(value, by_s)
    if origin is dict:
        return lambda value, by_s: {key: move(each, by_s) for key, each in value.items()}
    if get_args(kind)[-1] is Ellipsis:
        return lambda value, by_s: tuple(move(each, by_s) for each in value)
    return lambda value, by_s: tuple(f(x, by_s) if f else x for f, x in zip(parts, value, strict=True))


def _later(t_s: float, by_s: float) -> float:
    moved = t_s + by_s
    if not abs(moved) < MOST_S:
        raise ValueError("a time in it is out of range")
    return moved


def _with_fields(fields: list[tuple[str, Callable[[Any, float], Any]]]) -> Callable[[Any, float], Any]:
    def moved(value: Any, by_s: float) -> Any:
        # written for thousands of ranks: most fields are empty or a number
        new = {}
        for name, move in fields:
            old = getattr(value, name)
            if old is not None and old != ():
                new[name] = move(old, by_s)
        return msgspec.structs.replace(value, **new) if new else value

    return moved
