"""The text of source files that a page or a stack names. A path may lead to a pipe: `python <(cat train.py)`, or to a device."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from distdiag import guard

MOST_BYTES = 1 << 20


@lru_cache(maxsize=64)
def text(path: str) -> str | None:
    """Return the start of a source file; None for anything but a regular file."""
    try:
        with guard.regular(Path(path)) as f:
            return f.read(MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=1024)
def line(path: str, number: int) -> str:
    """Return a line of a source file without the blanks around it; empty if there is none."""
    lines = (text(path) or "").split("\n")
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""
