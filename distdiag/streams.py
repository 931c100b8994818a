"""Output where not every character can be shown: a plainer one in its place, never an error."""

from __future__ import annotations

import codecs
import io
import sys

_PLAIN = {
    "–": "-", "—": "-", "…": "...", "→": "->", "←": "<-", "·": ".", "×": "x", "µ": "u", "≥": ">=", "≤": "<=", "±": "+-",
    "Δ": "d", "█": "#", "▓": "%", "▒": "+", "░": ".", "╲": "\\", "✓": "ok", "✗": "x", "“": '"', "”": '"', "’": "'",
}  # fmt: skip
_ERRORS = "distdiag-plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c, "?") for c in part), error.end


codecs.register_error(_ERRORS, _plain)


def tolerate(ascii_only: bool = False) -> None:
    """Make stdout and stderr escape what they cannot encode; with `ascii_only` everything beyond ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not where a test or a notebook has put something else
            stream.reconfigure(encoding="ascii" if ascii_only else None, errors=_ERRORS)
