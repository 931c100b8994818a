"""A line of code as text, the same in messages, reports and on screens."""

from __future__ import annotations

import posixpath


def line_text(file: str, line: float | None, function: str | None = None, base: bool = False) -> str:
    """Return `src/train.py:88 in evaluate` (`base`: without directories); no function at the top of a file."""
    number = f":{int(line)}" if line is not None and line == line else ""
    inside = f" in {function}" if function and function != "<module>" else ""
    return f"{posixpath.basename(file) if base else file}{number}{inside}"
