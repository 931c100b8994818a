"""Move the times in the states of other nodes to this node's origin. The types name every time (`Seconds`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from distdiag.diagnosis.model.snapshot import RankState, Seconds, Step

MOST_S = 1e10  # a time beyond it is none


class Moved:
    """The ranks of other nodes with times of this node: made once per state, and once per step however many states have it."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[tuple[int, float, float], dict[int, RankState]]] = {}
        self._steps: dict[int, tuple[float, tuple[Step, ...], tuple[Step, ...]]] = {}  # of a rank: shift, sent, moved

    def of(
        self, node: int, written: tuple[int, float], ranks: dict[int, RankState], later_s: float
    ) -> dict[int, RankState]:
        """Return the ranks of a node's state, `later_s` seconds later.

        Args:
            written: Number of the state, and when it was written: equal for equal states.

        Raises:
            ValueError: a time in it is out of range.
        """
        mark = (*written, later_s)
        known = self._ranks.get(node)
        if known is None or known[0] != mark:
            known = self._ranks[node] = mark, {rank: self._rank(state, later_s) for rank, state in ranks.items()}
        return known[1]

    def _rank(self, state: RankState, by_s: float) -> RankState:
        before_s, sent, moved = self._steps.get(state.rank, (by_s, (), ()))
        new = state.steps
        last = next((i for i in range(len(new) - 1, -1, -1) if sent and new[i].step == sent[-1].step), -1)
        same = 0 if before_s != by_s or new[: last + 1] != sent[len(sent) - last - 1 :] else last + 1
        move = _mover(tuple[Step, ...])
        assert move is not None
        steps = (*moved[len(moved) - same :], *move(new[same:], by_s)) if same else move(new, by_s)
        self._steps[state.rank] = by_s, new, steps
        return msgspec.structs.replace(shifted(msgspec.structs.replace(state, steps=()), by_s), steps=steps)


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
    return lambda value, by_s: msgspec.structs.replace(
        value, **{name: move(getattr(value, name), by_s) for name, move in fields}
    )
