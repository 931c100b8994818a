"""Private names of torch, which its next version may not have: then only what depends on them is not recorded."""

from __future__ import annotations

from typing import Any

LACKING: list[str] = []  # names that this torch does not have


class Absent:
    """In the place of a class that this torch does not have: nothing is an instance of it."""


def private(owner: Any, name: str, otherwise: Any = Absent) -> Any:
    """Return an attribute of a module of torch; `otherwise`, and note its name, if this torch does not have it."""
    found = getattr(owner, name, None)
    if found is None:
        LACKING.append(f"{owner.__name__.removeprefix('torch.')}.{name}")
    return otherwise if found is None else found
