"""The fields that two records have under one name, and so in one unit."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any

import msgspec


@cache
def names(kind: type[msgspec.Struct], of: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name in of.__struct_fields__)


def shared(kind: type[msgspec.Struct], value: msgspec.Struct | None) -> dict[str, Any]:
    """Return the values of the fields that `value` shares with records of this kind; empty without one."""
    if value is None:
        return {}
    found = names(kind, type(value))
    return dict(zip(found, attrgetter(*found)(value), strict=True))
