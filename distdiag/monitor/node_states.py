"""The state that a node's monitor sends to node 0's, as bytes, and how it becomes ranks with node 0's times.

Most of a state is histories, of which most was in the state before: their items are bytes of their own, and an item that has the
bytes of a known one is not decoded again. So a state needs no earlier one, and each costs what is new in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from distdiag.diagnosis.model.snapshot import Group, RankState, Seconds

VERSION = 2
MOST_S = 1e10  # a time beyond it is none
MOST_GROUPS = 4096  # of one node
# fields of a rank, with the most items sent
HISTORIES = {"steps": 64, "calls": 16, "memory": 120, "device_memory": 120}
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one node, as its monitor sees them; times in seconds since `started_unix_s`."""

    version: int = VERSION
    node: int
    number: int  # of this state, increasing
    started_unix_s: float
    written_unix_s: float
    closed: bool = False  # the job is over: this is the last state
    local_world_size: int
    ranks: dict[int, RankState]  # without their histories
    histories: dict[int, dict[str, tuple[bytes, ...]]] = {}  # of each rank, oldest first, each item encoded
    groups: dict[str, msgspec.Raw]  # encoded: all nodes of a job have the same large ones


@dataclass(frozen=True)
class Heard:
    """A state of another node, with times since this node's run began."""

    node: int
    number: int
    written_unix_s: float
    closed: bool
    local_world_size: int
    ranks: dict[int, RankState]
    groups: dict[str, Group]


def parts(ranks: dict[int, RankState], groups: dict[str, Group]) -> dict[str, Any]:
    """Return `ranks`, `histories` and `groups` of a `NodeState`."""
    encode = msgspec.msgpack.encode
    without = dict.fromkeys(HISTORIES, ())
    return {
        "ranks": {q: msgspec.structs.replace(r, **without) for q, r in ranks.items()},
        "histories": {
            q: {name: tuple(map(encode, getattr(r, name)[-most:])) for name, most in HISTORIES.items()}
            for q, r in ranks.items()
        },
        "groups": {name: msgspec.Raw(encode(g)) for name, g in groups.items()},
    }


class Readings:
    """Makes ranks with times of this node of the states that arrive."""

    def __init__(self) -> None:
        # of a rank's history: shift, hashes of the items' bytes (randomised by Python), items
        self._known: dict[tuple[int, str], tuple[float, array[int], tuple[Any, ...]]] = {}

    def heard(self, x: NodeState, later_s: float) -> Heard:
        """Return a state whose times are `later_s` seconds later.

        Raises:
            msgspec.MsgspecError, ValueError, RecursionError: a history or a group cannot be read, or a time is out of range.
        """
        ranks = {}
        for q, r in x.ranks.items():
            sent = x.histories.get(q, {})
            found = {name: self._history(q, name, sent[name], later_s) for name in HISTORIES if sent.get(name)}
            ranks[q] = msgspec.structs.replace(shifted(r, later_s), **found)
        groups = {name: _group(bytes(raw)) for name, raw in x.groups.items()}
        return Heard(x.node, x.number, x.written_unix_s, x.closed, x.local_world_size, ranks, groups)

    def _history(self, rank: int, name: str, sent: tuple[bytes, ...], by_s: float) -> tuple[Any, ...]:
        marks = array("q", map(hash, sent))
        before_s, known, items = self._known.get((rank, name), (by_s, marks[:0], ()))
        first = same = 0
        if before_s == by_s and marks[0] in known:
            first = known.index(marks[0])
            most = min(len(known) - first, len(marks))
            same = most
            if marks[:most] != known[first : first + most]:
                same = next(i for i in range(most) if marks[i] != known[first + i])
        decode, move = _item(name)
        new = tuple(move(decode(data), by_s) for data in sent[same:])
        items = (*items[first : first + same], *new)
        self._known[rank, name] = by_s, marks, items
        return items


@lru_cache(maxsize=MOST_GROUPS)
def _group(data: bytes) -> Group:
    return msgspec.msgpack.decode(data, type=Group)


@cache
def _item(name: str) -> tuple[Callable[[bytes], Any], Callable[[Any, float], Any]]:
    """Return what decodes one item of a history, and what moves its times."""
    kind = get_args(get_type_hints(RankState, include_extras=True)[name])[0]
    move = _mover(kind)
    assert move is not None
    return msgspec.msgpack.Decoder(kind).decode, move


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
        fields = [(name, of_field) for name, of in hints.items() if (of_field := _mover(of)) is not None]
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
        # written for ten thousand steps a second: most fields are empty or a number
        new = {}
        for name, move in fields:
            old = getattr(value, name)
            if type(old) is float:
                new[name] = t_s = old + by_s
                if not -MOST_S < t_s < MOST_S:
                    raise ValueError("a time in it is out of range")
            elif old is not None and old != ():
                new[name] = move(old, by_s)
        return msgspec.structs.replace(value, **new) if new else value

    return moved
