"""Small JSON files in a page directory, in which processes of one user ask and answer each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from distdiag import files

MAX_BYTES = 256 * 1024  # of a file
_MAX_INT = 1 << 62


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a small file of this user that no other user can write.

    Raises:
        OSError: it cannot be read.
        ValueError: it belongs to another user, is too large, or is not a JSON object.
    """
    with open(files.open_to_read(path.parent, path.name), "rb") as f:
        found = os.fstat(f.fileno())
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ValueError(f"{path.name} is not a file of this user, or others can write it")
        data = f.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path.name} is too large")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value


def count(value: Any, least: int = 0, most: int = _MAX_INT) -> int:
    """Return a value that must be a whole number in this range.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from {least} to {most}")
    return value
