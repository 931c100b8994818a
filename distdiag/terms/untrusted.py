"""Text and numbers from a job or an untrusted file: made safe to print, and limited in size."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any

MAX_RANKS = 1 << 17  # the largest jobs published so far have about 100,000 ranks
MAX_INT = 1 << 62  # larger numbers do not fit JSON readers, and Python may refuse to print them
MAX_TEXT = 4096  # characters of a name, a path or an operation; the longest path of Linux

# categories of Unicode that no reader prints as they are
INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Me"})
_MARKS = 2  # combining marks on one character; more of them cover the lines above and below
_NUMBER = re.compile(r"[0-9]+")
_TOKEN = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[])([+*])?", re.DOTALL)
_LAST = re.compile(r"[)?$]*")  # what may follow an open repeat that can end a match in one way only
REPEATS = {r"\d": 20, ")": 4096}  # longest number and list in a message; anything else:
MOST_REPEATS = 400


def bounded(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Compile a pattern that is searched in hostile text: an open repeat inside it (`\\w+`) is limited.

    Else a line of n characters at each of which the pattern can begin takes n² steps. `\\d+` matches numbers that no field exceeds,
    so `int` of a group is safe. Open remain the repeat at the end, and `.*` of a pattern that begins with `^`.
    """

    def limited(m: re.Match[str]) -> str:
        token, more = m[1], m[2]
        if (
            more is None
            or (_LAST.fullmatch(pattern, m.end()) and token != r"\d")
            or (token == "." and pattern[0] == "^")
        ):
            return m[0]
        return f"{token}{{{int(more == '+')},{REPEATS.get(token, MOST_REPEATS)}}}"

    return re.compile(_TOKEN.sub(limited, pattern), flags)


@lru_cache(maxsize=8192)
def visible(text: str) -> str:
    """Return `text` with control, bidirectional and invisible characters written as escapes (`\\x1b`).

    Host names, paths, exceptions and group names come from the job. Printed as they are, they could move the cursor,
    change the title of the terminal, or hide what follows.
    """
    if text.isascii() and text.isprintable():
        return text
    out = []
    marks = 0
    for ch in text:
        category = unicodedata.category(ch)
        marks = marks + 1 if category == "Mn" else 0
        if category in INVISIBLE or marks > _MARKS:
            out.append(ch.encode("unicode_escape", "surrogatepass").decode("ascii"))
        else:
            out.append(ch)
    return "".join(out)


def cut(text: str, most: int = MAX_TEXT) -> str:
    """Return `text`, of a longer one its first and last characters."""
    return text if len(text) <= most else f"{text[: most - most // 4 - 1]}…{text[-(most // 4) :]}"


def encodable(text: str) -> str:
    """Return `text` with lone surrogates written as escapes, so that it can be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def all_encodable(value: Any) -> Any:
    """Apply `encodable` to every string in dicts, lists and tuples (as `msgspec.to_builtins` returns them)."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {all_encodable(k): all_encodable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [all_encodable(v) for v in value]
    return value


def is_count(value: object) -> bool:
    """True for an int from 0 to `MAX_INT`, and not for a bool."""
    return type(value) is int and 0 <= value < MAX_INT


def is_rank(value: object) -> bool:
    """True for an int that can be a rank."""
    return type(value) is int and 0 <= value < MAX_RANKS


def short_text(value: object) -> str:
    """Return a string, or a number as a string; "" for anything else, and for what is longer than `MAX_TEXT`."""
    if type(value) is str:
        return value if len(value) <= MAX_TEXT else ""
    return str(value) if is_count(value) else ""


def numbers(text: str) -> list[int]:
    """Return the decimal numbers in `text`; one with more than 18 digits counts as `MAX_INT`."""
    return [int(n) if len(n) <= 18 else MAX_INT for n in _NUMBER.findall(text)]
