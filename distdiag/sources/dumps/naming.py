"""Finds out which rank a dump belongs to if its content lacks the rank: by file names, folders, and groups."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from distdiag.sources.dumps.content import DumpFile
from distdiag.terms.ranks import grouped
from distdiag.terms.untrusted import is_rank, numbers

_RANK = re.compile(r"rank[-_.=]?([0-9]{1,9})(?![0-9])", re.IGNORECASE)


def name_ranks(files: Sequence[DumpFile]) -> None:
    """Set `rank` of every file whose content lacks it.

    In this order: `rank3` in the file's name; the number in which the names of a folder differ; the only rank that is in
    all groups of the file; `rank3` in a folder's name; the number in which the folders' names differ.
    """
    for f in files:
        if f.rank is None and (found := _RANK.findall(f.path.name)) and is_rank(rank := int(found[-1])):
            f.rank = rank
    for neighbours in grouped((f.path.parent, f) for f in files if f.rank is None).values():
        _by_position(neighbours, [_stem(f.path) for f in neighbours])
    for f in (f for f in files if f.rank is None):
        members = [set(ranks) for _, ranks in f.groups.values() if ranks]
        common = set.intersection(*members) if members else set[int]()
        ranks = [found[-1] for part in reversed(f.path.parts[:-1]) if (found := _RANK.findall(part))]
        if len(common) == 1:  # the recorder lists only the groups that the rank is in
            f.rank = common.pop()
        elif ranks and _plausible(f, int(ranks[0])):
            f.rank = int(ranks[0])
    nowhere = [f for f in files if f.rank is None]
    folders = [os.path.dirname(os.path.abspath(f.path)) for f in nowhere]
    if len({f.path for f in nowhere}) > 1:
        top = os.path.commonpath(folders)
        _by_position(nowhere, [os.path.relpath(folder, top) for folder in folders])


def _by_position(files: list[DumpFile], names: list[str]) -> None:
    """Set ranks from the last number in the names that differs in all of them and is a member of the file's groups."""
    found = [numbers(name) for name in names]
    for column in zip(*map(reversed, found), strict=False):
        ranks = list(zip(files, column, strict=True))
        if len(set(column)) == len(column) and all(_plausible(f, rank) for f, rank in ranks):
            for f, rank in ranks:
                f.rank = rank
            return
    for f, own in zip(files, found, strict=True):
        if own and _plausible(f, own[-1]):
            f.rank = own[-1]


def _stem(path: Path) -> str:
    """Return the file's name without suffixes that are not numbers."""
    name = path.name
    while (suffix := Path(name).suffix) and not suffix[1:].isdigit():
        name = name[: -len(suffix)]
    return name


def _plausible(f: DumpFile, rank: int) -> bool:
    """True if every group of the file with known members has this rank."""
    return is_rank(rank) and all(rank in ranks for _, ranks in f.groups.values() if ranks)
