"""Joins lines that a terminal has wrapped at its column, or rich to its width. The lines around them keep their numbers.

The whole line takes the place of its last part; those of the others become empty. The line before a traceback stays there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from distdiag.terms.untrusted import bounded

MAX_JOINED = 1 << 13  # bytes of one line that are read
AFTER_BOX = 12  # lines of an exception's message
ERROR = b"ERROR"  # of the handler; a block without one is not joined
# the begin of the last line of a box; its byte that is seldom elsewhere
RICH, RARE = b"\xe2\x95\xb0\xe2\x94\x80", b"\xb0"
_COLOURS = re.compile(rb"\x1b\[[\d;]{0,30}[A-Za-z]")
_PREFIX = bounded(r"^(?:\[\w{1,20}\]: ?)?")  # of a launcher
# rich's handler: the time, or as much space; the level, eight characters wide; the message; at the right its place in the code
_HANDLER = bounded(
    r"^(?:\[\w{1,20}\]: ?)?(?:\[[^\]]{5,40}\]| {7,42}) (?:DEBUG   |INFO    |WARNING |ERROR   |CRITICAL) (?=\S)"
)
_PLACE = bounded(r" \S{1,80}\.py:\d{1,6}\s*$")
_NUMBER = bounded(r":\d{1,7}\W*$")  # of a line, before its function
_FRAME = bounded(r":\d{1,7} in \S")


def at_column(blocks: Iterable[bytes], column: int) -> Iterator[bytes]:
    """Yield blocks of whole lines, those joined that are exactly as long as a terminal's lines."""
    whole = b""
    for block in blocks:
        out = []
        for raw in block.removesuffix(b"\n").split(b"\n"):
            whole += raw
            ends = len(raw) != column or len(whole) >= MAX_JOINED
            out.append(whole if ends else b"")
            whole = b"" if ends else whole
        yield b"\n".join(out) + b"\n" * block.endswith(b"\n")


def is_rich(block: bytes) -> bool:
    """True if rich's handler has written some lines of a block."""
    lines = _COLOURS.sub(b"", block).decode("utf-8", "replace").split("\n")
    return any(_HANDLER.match(line) and (line[0] == " " or _PLACE.search(line)) for line in lines)


def of_rich(block: bytes) -> bytes:
    """Return a block of lines, those of rich joined: messages of its logging handler, paths in a box, what follows the box."""
    lines = _COLOURS.sub(b"", block).decode("utf-8", "replace").split("\n")
    column = width = 0  # of the handler's messages; of the last box
    last, path = -1, -1  # the line that the next one may continue; the same in a box
    length = left = 0  # of the line before; lines after a box that may be wrapped
    for i, line in enumerate(lines):
        prefix = _PREFIX.match(line)[0]  # type: ignore[index]
        if (head := _HANDLER.match(line)) is not None:
            column, left, last = head.end(), 0, i
            lines[i] = _PLACE.sub("", line)
            continue
        if column and (len(line) <= column or not line[len(prefix) : column].isspace()):
            column, last = 0, -1
        text = line[column or len(prefix) :].rstrip()
        if text[:1] in ("╭", "│", "╰"):
            width, left, last = len(text), AFTER_BOX if text[0] == "╰" else 0, -1
            if path >= 0:
                cut = length == width and not lines[path][:-2].endswith(" ") and not _NUMBER.search(lines[path])
                text = f"{lines[path].removeprefix(prefix).rstrip('│ ')}{'' if cut else ' '}{text.lstrip('│ ')}"
                lines[path] = ""
            lines[i], length = prefix + text, len(text)
            goes_on = (path >= 0 or text.startswith("│ /")) and not _FRAME.search(text) and length < MAX_JOINED
            path = i if goes_on else -1
            continue
        word = len(text.lstrip().partition(" ")[0])
        whole = bool(left) and not length <= 1.25 * width < 1.25 * (length + 1 + word)  # it had room for the next word
        if last >= 0 and (column or left) and not (left and not column and whole):
            text, lines[last] = f"{lines[last].removeprefix(prefix).rstrip()} {text.strip()}"[:MAX_JOINED], ""
        if column or left:
            lines[i], last, left = prefix + text, i, max(left - 1, 0)
            length = len(line[column or len(prefix) :].rstrip())
    return "\n".join(lines).encode()
