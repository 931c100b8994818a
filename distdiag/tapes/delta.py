"""Differences between two snapshots: made by `difference`, and applied with types by `apply`.

A difference is `[value]` (replaced), a map (fields of a record, or keys of a dict; nil: the key is gone), or `[dropped, {index: difference},
appended]` for a sequence, whose oldest items go and whose newest come. `None`: nothing has changed.
"""

from __future__ import annotations

import types
import typing
from functools import lru_cache
from typing import Any

import msgspec

Difference = list | dict | None
MAX_DEPTH = 16


def difference(old: Any, new: Any) -> Difference:
    """Return what makes `new` of `old`."""
    if type(old) is not type(new):
        return [new]
    if old == new:
        return None
    if isinstance(new, msgspec.Struct):
        found = {name: difference(getattr(old, name), getattr(new, name)) for name in new.__struct_fields__}
        return {name: change for name, change in found.items() if change is not None}
    if isinstance(new, dict):
        changes: dict = {key: None for key in old if key not in new}
        for key, value in new.items():
            change = difference(old[key], value) if key in old else [value]
            if change is not None:
                changes[key] = change
        return changes
    return _of_sequences(old, new) if isinstance(new, tuple) and old and new else [new]


def _of_sequences(old: tuple, new: tuple) -> list:
    dropped = _dropped(old, new)
    kept = min(len(old) - dropped, len(new))
    if kept <= 0 or len(old) - dropped > len(new):
        return [new]
    pairs = zip(old[dropped:], new[:kept], strict=True)
    changed = {i: change for i, (a, b) in enumerate(pairs) if (change := _of_items(a, b)) is not None}
    return [dropped, changed, new[kept:]] if len(changed) <= kept // 2 + 1 else [new]


def _of_items(old: Any, new: Any) -> Difference:
    return difference(old, new) if not isinstance(new, tuple) else None if old == new else [new]


def _dropped(old: tuple, new: tuple) -> int:
    """Return how many of the oldest items of `old` are gone in `new`."""
    for i in (0, len(new) // 2, len(new) - 1):  # an item may have changed: a call that has completed
        if new[i] in old and old.index(new[i]) >= i:
            return old.index(new[i]) - i
    return 0


def apply(kind: Any, old: Any, change: Any, depth: int = 0) -> Any:
    """Return the new value of type `kind`: `old` with `change`, an untrusted decoded difference.

    Raises:
        msgspec.ValidationError: `change` does not fit `old` or its type.
    """
    if change is None:
        return old
    if depth > MAX_DEPTH:
        raise msgspec.ValidationError("a difference is nested too deeply")
    if isinstance(change, list) and len(change) == 1:
        return msgspec.convert(change[0], kind)
    if isinstance(change, dict) and isinstance(old, msgspec.Struct):
        fields = _fields(type(old))
        changed = {
            name: apply(fields[name], getattr(old, name), inner, depth + 1)
            for name, inner in change.items()
            if name in fields  # a newer recorder may know more
        }
        return msgspec.structs.replace(old, **changed)
    if isinstance(change, dict) and isinstance(old, dict):
        key_type, value_type = _inner(kind)
        new = dict(old)
        for key, inner in change.items():
            key = msgspec.convert(key, key_type)
            if inner is None:
                new.pop(key, None)
            else:
                new[key] = apply(value_type, new.get(key), inner, depth + 1)
        return new
    if isinstance(change, list) and len(change) == 3 and isinstance(old, tuple):
        return _sequence(kind, old, change, depth)
    raise msgspec.ValidationError("a difference does not fit the snapshot before it")


def _sequence(kind: Any, old: tuple, change: list, depth: int) -> tuple:
    (item_type, *more), (dropped, changed, appended) = _inner(kind), change
    if more != [...] or not (isinstance(dropped, int) and isinstance(changed, dict) and 0 <= dropped <= len(old)):
        raise msgspec.ValidationError("a difference does not fit the sequence before it")
    kept = list(old[dropped:])
    for i, inner in changed.items():
        if not (isinstance(i, int) and 0 <= i < len(kept)):
            raise msgspec.ValidationError("a difference names an item that is not there")
        kept[i] = apply(item_type, kept[i], inner, depth + 1)
    return (*kept, *msgspec.convert(appended, tuple[item_type, ...]))


@lru_cache(maxsize=256)
def _fields(record: type[msgspec.Struct]) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {name: hints[name] for name in record.__struct_fields__}


@lru_cache(maxsize=256)
def _inner(kind: Any) -> tuple[Any, ...]:
    """Return the types inside of a dict or a tuple type, which may be optional."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    return typing.get_args(kind) or (Any, Any)
