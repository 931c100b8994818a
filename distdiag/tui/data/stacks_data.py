"""The stacks of all ranks as one tree, from the newest dump or else of single lines; and the source of where ranks are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distdiag.store import stacks as store
from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.terms.frames import USER, owner
from distdiag.tui.data import excerpt
from distdiag.tui.data.snapshot import Request

MAX_SITES = 6
MAX_LINES = 20_000  # of the tree


@dataclass(frozen=True)
class TreeLine:
    """One line of the tree: frames that all of `ranks` share."""

    depth: int
    frame: str
    ranks: tuple[int, ...]
    splits: bool  # the ranks of its parent part here
    first: bool  # the root
    leaf: bool


@dataclass(frozen=True)
class Site:
    """The innermost line of the job's own code that some ranks are at."""

    ranks: tuple[int, ...]
    function: str
    source: excerpt.Excerpt


@dataclass(frozen=True)
class StacksData:
    """The merged tree, from a dump, or of single lines where none was taken; and the source of where ranks are."""

    t_s: float | None = None
    lines: tuple[TreeLine, ...] = ()
    dumped: bool = False
    ranks: int = 0
    sites: tuple[Site, ...] = ()  # fewest ranks first


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> StacksData:
    """Return the newest dump in the run directory; without one, the site from each rank's page."""
    found = store.read(run.path)
    if found is None:
        now = places(frame)
        return StacksData(frame.t_s, _lines(now), False, len(frame.table), _sites(run, now, cache))
    key = (found.t_s, len(found.ranks))
    if cache.get("stacks", (None,))[0] != key:
        cache["stacks"] = (key, _lines(found))
    return StacksData(found.t_s, cache["stacks"][1], True, len(found.ranks), _sites(run, found, cache))


def _sites(run: Run, found: store.Stacks, cache: dict[Any, Any]) -> tuple[Site, ...]:
    """Return the lines that ranks are at, those of the fewest ranks first, with their source."""
    ranks: dict[tuple[str, str, int], list[int]] = {}
    for rank, each in found.ranks.items():
        own = (f for f in map(parsed, reversed(each.stack)) if f is not None and owner(f[1]) == USER)
        if (site := next(own, None)) is not None:
            ranks.setdefault(site, []).append(int(rank))
    few = sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))[:MAX_SITES]
    sources = excerpt.cached(run, [(file, line) for (_, file, line), _ in few], cache)
    return tuple(Site(tuple(sorted(r)), site[0], s) for (site, r), s in zip(few, sources, strict=True))


def parsed(frame: str) -> tuple[str, str, int] | None:
    """Return function, file and line of `function file:line`; None if it is not a frame."""
    function, _, at = frame.rpartition(" ")
    file, _, n = at.rpartition(":")
    return (function, file, int(n)) if function and file and re.fullmatch("[0-9]{1,9}", n) else None


def places(frame: Frame) -> store.Stacks:
    """Return every rank's innermost line as a stack of one frame."""
    words = [frame.table.words(name) for name in ("file", "function", "waiting_op", "life")]
    numbers = [frame.table.numbers(name) for name in ("rank", "line", "waiting_seq")]
    out = {}
    for file, function, op, life, rank, n, seq in zip(*words, *numbers, strict=True):
        at = f"{function or '?'} {file}:{int(n)}" if file and n == n else None
        call = f"{op} #{int(seq)}" if op and seq == seq else op
        out[str(int(rank))] = store.RankStack(stack=(at,) if at else (), op=call, note=f"no place known ({life})")
    return store.Stacks(t_s=frame.t_s, ranks=out)


def _lines(found: store.Stacks) -> tuple[TreeLine, ...]:
    return tuple(itertools.islice(_flatten(store.merge(found), 0), MAX_LINES))


def _flatten(branches: list[store.Branch], depth: int, root: bool = True) -> Iterator[TreeLine]:
    for b in branches:
        yield TreeLine(depth, b.frame, tuple(b.ranks), len(branches) > 1, root, not b.children)
        # a chain stays at its depth; only where ranks part does the tree indent
        yield from _flatten(b.children, depth + (1 if len(b.children) > 1 else 0), root=False)
