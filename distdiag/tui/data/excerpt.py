"""The source around a line that a finding names: read-only, bounded, and never more than text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distdiag.guard import regular
from distdiag.store.liveness import number
from distdiag.store.reader import Run
from distdiag.terms.untrusted import visible

BEFORE, AFTER = 24, 8  # lines that are read; what decides whether a rank gets to a line is above it
KEPT = 16  # excerpts in the cache
MAX_BYTES = 1 << 20
MAX_LINE = 400  # characters of a line


@dataclass(frozen=True)
class Excerpt:
    """Lines of a Python file around one of them."""

    file: str
    line: int  # number of the line in question
    lines: tuple[tuple[int, str], ...] = ()  # `(number, text)`, cleaned; empty if the file cannot be shown
    why: str = ""  # why it cannot be shown, or what to know about it

    def near(self, most: int) -> Excerpt:
        """Return at most so many of its lines, but five: up to a third of them after the line, the others before it."""
        after = max(2, (most - 1) // 3)
        before = max(2, most - 1 - after)
        return replace(self, lines=tuple(x for x in self.lines if self.line - before <= x[0] <= self.line + after))


def read(file: str, line: int, started_unix_s: float | None) -> Excerpt:
    """Read the lines around `line`; only a regular Python file of at most `MAX_BYTES` is opened."""
    if not (file.startswith("/") and file.endswith(".py")) or "\0" in file:
        return Excerpt(file, line)
    try:
        with regular(Path(file)) as source:  # a path comes from the job
            about = os.fstat(source.fileno())
            if about.st_size > MAX_BYTES:
                return Excerpt(file, line, why="its source is no regular file of at most 1 MiB")
            data = source.read(MAX_BYTES)
    except OSError:
        return Excerpt(file, line, why="its source is not readable on this machine")
    every = data.decode("utf-8", "replace").split("\n")
    if not 1 <= line <= len(every):
        return Excerpt(file, line, why="its source has fewer lines now")
    first = max(1, line - BEFORE)
    shown = every[first - 1 : line + AFTER]
    lines = tuple((first + i, visible(x[:MAX_LINE].rstrip("\r").expandtabs(4))) for i, x in enumerate(shown))
    changed = started_unix_s is not None and about.st_mtime > started_unix_s
    return Excerpt(file, line, lines, "changed since the run began: lines may have moved" if changed else "")


def cached(run: Run, places: Iterable[tuple[str, int]], cache: dict[Any, Any]) -> tuple[Excerpt, ...]:
    """Return the excerpts for some sites; each is read once."""
    started_unix_s = number(run.meta.get("started_unix_s"))
    kept: dict[tuple[str, int], Excerpt] = cache.setdefault("excerpts", {})
    out = []
    for place in places:
        kept[place] = kept.pop(place, None) or read(*place, started_unix_s)  # the newest last
        out.append(kept[place])
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
    return tuple(out)
