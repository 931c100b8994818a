"""`RUN/stacks/latest.json`: the stacks of all ranks at one moment, written by `distdiag dump`, shown by the TUI."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec

from distdiag import files
from distdiag.terms.frames import USER, owner
from distdiag.terms.units import counted
from distdiag.terms.untrusted import cut, visible

NAME = "stacks/latest.json"
MAX_FRAMES = 400  # of one stack; each is a level of the tree
MAX_FRAME = 400  # characters of a frame in the tree's lines
_FILE = re.compile(r" (/.*):[0-9]+$")  # of a frame
_RANK = re.compile(r"[0-9]{1,6}")


class RankStack(msgspec.Struct, frozen=True, kw_only=True):
    """Main thread of one rank."""

    stack: tuple[str, ...] = ()  # "function file:line", outermost first
    op: str | None = None  # the collective it is in: "all_reduce #417 default_pg"
    note: str | None = None  # why there is no stack ("did not answer within 2 s"), or "GIL held"


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks of all ranks; keys of `ranks` are rank numbers as text, because JSON has no others."""

    t_s: float  # seconds since the run began
    ranks: dict[str, RankStack]


class Branch(msgspec.Struct):
    """A node of the merged prefix tree: the ranks whose stacks are equal from the root to this frame."""

    frame: str
    ranks: list[int]
    children: list[Branch]


def merge(stacks: Stacks) -> list[Branch]:
    """Return the prefix tree of all stacks, outermost frame first, large branches first.

    Ranks without a stack form one branch per note.
    """

    def grow(paths: list[tuple[int, tuple[str, ...]]], depth: int) -> list[Branch]:
        by_frame: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
        for rank, path in paths:
            if depth < len(path):
                by_frame.setdefault(path[depth], []).append((rank, path))
        out = [Branch(f, sorted(r for r, _ in members), grow(members, depth + 1)) for f, members in by_frame.items()]
        return sorted(out, key=lambda b: (-len(b.ranks), b.ranks))

    paths = []
    for key, s in stacks.ranks.items():
        path = s.stack or (s.note or "no stack",)
        paths.append((int(key), (*path, f"in {s.op}") if s.op else path))
    return grow(paths, 0)


def tree_lines(branches: list[Branch], indent: int = 0, above: int = 0) -> list[str]:
    """Return the merged tree as lines: `3 ranks  all_reduce …`. A branch omits the ranks if its parent has the same.

    `>` marks frames of the user's own code.
    """
    out: list[str] = []
    for b in branches:
        ranks = b.ranks
        head = ""
        if len(ranks) != above:
            shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
            head = f"{counted(len(ranks), 'rank')} ({shown})  "
        mark = "> " if (at := _FILE.search(b.frame)) and owner(at[1]) == USER else ""
        out.append("  " * indent + head + mark + cut(visible(b.frame), MAX_FRAME))
        out += tree_lines(b.children, indent + 1, len(ranks))
    return out


def write(run_dir: Path, stacks: Stacks) -> Path:
    """Write `RUN/stacks/latest.json` atomically and return its path.

    Raises:
        OSError: the run directory cannot be written.
    """
    return files.write(run_dir, NAME, msgspec.json.format(msgspec.json.encode(stacks), indent=1))


def read(run_dir: Path) -> Stacks | None:
    """Return the newest stacks; None if there are none, or the file is invalid."""
    try:
        found = msgspec.json.decode(files.read(run_dir, NAME), type=Stacks)
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        return None
    valid = all(_RANK.fullmatch(key) and len(s.stack) <= MAX_FRAMES for key, s in found.ranks.items())
    return found if valid and math.isfinite(found.t_s) else None
