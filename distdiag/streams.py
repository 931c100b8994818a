"""What the commands print: text by `say`, errors by `say_error`, JSON by `say_json`; nothing from a job is raw.

Where not every character can be shown, a plainer one or an escape is in its place, never an error.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
import unicodedata
from typing import Any

from distdiag.terms.tables import wrapped
from distdiag.terms.untrusted import INVISIBLE, cut, visible

_PLAIN = {
    "–": "-", "—": "-", "…": "...", "→": "->", "←": "<-", "·": ".", "×": "x", "µ": "u", "≥": ">=", "≤": "<=", "±": "+-",
    "Δ": "d", "█": "#", "▲": "!", "▓": "%", "▒": "+", "░": ".", "╲": "\\", "✓": "ok", "✗": "x", "“": '"', "”": '"', "’": "'",
}  # fmt: skip
PLAINER = "distdiag-plain"  # how text is encoded: what cannot be shown becomes a plainer character, or an escape


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in part), error.end


codecs.register_error(PLAINER, _plain)


def open_closed() -> None:
    """Open those of stdin, stdout and stderr that are closed: else a file gets their number, and what is printed is written into it."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for the life of the process


def tolerate(ascii_only: bool = False) -> None:
    """Make stdout and stderr escape what they cannot encode; with `ascii_only` everything beyond ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not where a test or a notebook has put something else
            stream.reconfigure(encoding="ascii" if ascii_only else None, errors=PLAINER)


def wants_colour() -> tuple[bool, bool]:
    """Return (escapes, colours) by NO_COLOR, FORCE_COLOR, TERM and whether the output is a terminal."""
    forced = os.environ.get("FORCE_COLOR", "") not in ("", "0")
    terminal = (sys.stdout.isatty() and os.environ.get("TERM") != "dumb") or forced
    return terminal, terminal and (forced or not os.environ.get("NO_COLOR"))


def needs_ascii(stream: Any = None) -> bool:
    """True where the output cannot carry the glyphs."""
    encoding = (getattr(stream or sys.stdout, "encoding", None) or "ascii").lower().replace("-", "").replace("_", "")
    return not encoding.startswith("utf")


_COLOURS = re.compile("(\x1b\\[[0-9;]{0,40}m)")
_OTHERS = re.compile(r"[^\n -~]+")


def say(text: str = "", *, err: bool = False, drawn: bool = False, flush: bool = False) -> None:
    """Print lines on stdout or stderr, with control, bidirectional and invisible characters written as escapes.

    Args:
        drawn: It has colours of ours; what was in it before was made visible there.
    """
    parts = _COLOURS.split(text) if drawn else [text]
    shown = "".join(p if i % 2 else "\n".join(map(visible, p.split("\n"))) for i, p in enumerate(parts))
    print(shown, file=sys.stderr if err else sys.stdout, flush=flush)


def columns() -> int:
    """Return how many columns a text may have: those of the terminal, 80 in a pipe."""
    return max(40, min(shutil.get_terminal_size().columns, 140))


def say_wrapped(text: str, *, err: bool = False, flush: bool = False) -> None:
    """Print a text in as many lines as it needs."""
    say("\n".join(wrapped(text, columns())), err=err, flush=flush)


def say_error(message: str, hint: str, *, flush: bool = False) -> None:
    """Print an error on stderr, as two lines whatever is in them: a name may contain newlines."""
    for line in (f"distdiag: error: {message}", f"hint: {hint}"):
        print(cut(visible(line)), file=sys.stderr, flush=flush)


def say_json(value: Any, *, flush: bool = False) -> None:
    """Print a JSON text, or anything else as JSON, on stdout, with escapes for what a terminal may obey or cannot show."""
    if not isinstance(value, (bytes, str)):
        import msgspec

        value = msgspec.json.encode(value)
    text = json_ascii_controls(value)
    if needs_ascii():
        text = _OTHERS.sub(lambda m: "".join(map(_json_escape, m[0])), text)
    print(text, flush=flush)


def json_ascii_controls(encoded: bytes | str) -> str:
    """Return a JSON text in which characters that a terminal may obey are escapes (`\\u009b`)."""
    text = encoded if isinstance(encoded, str) else encoded.decode()
    return _OTHERS.sub(
        lambda m: "".join(_json_escape(c) if unicodedata.category(c) in INVISIBLE else c for c in m[0]), text
    )


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
