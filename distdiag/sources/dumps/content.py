"""Checks the content of a dump: types, ranges and sizes, before anything else reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from distdiag.sources.dumps.entries import Entry, entries_of
from distdiag.sources.dumps.pickles import BadDump
from distdiag.terms.untrusted import MAX_RANKS, is_count, is_rank, numbers, short_text

MAX_ENTRIES = 1 << 20  # the largest ring in use has some 20,000
_KEYS = {"profiling_name", "pg_id", "process_group", "collective_seq_id", "seq_id"}  # of an entry, in any version
MAX_GROUPS = 1 << 16
_COUNTER = re.compile(r"-1|[0-9]{1,18}")
MAX_MEMBERS_TEXT = 8 * MAX_RANKS  # characters of "[0, 1, …]"


@dataclass(slots=True)
class DumpFile:
    """One rank's dump as read."""

    path: Path
    rank: int | None = None  # from the content or the file name; None until known
    # group name -> (description, global ranks or None where not recorded)
    groups: dict[str, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict)
    # the recorder's own group number -> (last enqueued, last completed). NCCL's number counts collectives or messages,
    # whichever came last; gloo's counts both
    status: dict[str, tuple[int, int]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)  # as recorded, oldest first; the oldest may be overwritten
    damaged: int = 0  # entries that were left out: they lack a group, number or name
    modified_ns: int = 0

    @property
    def backend(self) -> str:
        """`nccl`, `gloo`, `nccl2`, …; empty for a dump without entries."""
        backend, colon, _ = self.entries[-1].profiling_name.partition(":") if self.entries else ("", "", "")
        return backend if colon else ""

    @property
    def newest_ns(self) -> int:
        """When the newest entry was created; 0 if that is not recorded."""
        return (self.entries[-1].created_ns or 0) if self.entries else 0


def parse(path: Path, content: Any) -> DumpFile:
    """Return the dump in decoded JSON or pickle, format version 1.x or 2.x.

    Raises:
        BadDump: it is something else, or exceeds the limits of any real dump.
    """
    if isinstance(content, dict) and "entries" not in content and isinstance(content.get("dump"), dict):
        content = {**content["dump"], "rank": content.get("rank")}
    if isinstance(content, list):  # torch 2.1 and 2.2: only the list of entries
        content = {"entries": content}
    if not isinstance(content, dict) or not ("entries" in content or "pg_status" in content):
        raise BadDump("not a flight-recorder dump: no entries")
    entries = content.get("entries")
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries[:1] + entries[-1:]):
        raise BadDump("not a flight-recorder dump: its entries are no list of records")
    if entries and not any(_KEYS & e.keys() for e in entries[:1] + entries[-1:]):
        raise BadDump("not a flight-recorder dump: its records are of something else")
    if len(entries) > MAX_ENTRIES:
        raise BadDump(f"{len(entries):,} entries; no recorder keeps more than {MAX_ENTRIES:,}")
    rank = content.get("rank")
    if type(rank) is int and rank >= MAX_RANKS:
        raise BadDump(f"its rank is out of range (0 to {MAX_RANKS - 1:,})")
    groups, status = _groups(content.get("pg_config")), _status(content.get("pg_status"))
    return DumpFile(path, rank if is_rank(rank) else None, groups, status, *entries_of(entries))


def _members(value: Any) -> tuple[int, ...] | None:
    """Return the ranks in `[0, 1]`, a list or its text, in their order; None if there are none or it is not such a list.

    Raises:
        BadDump: a rank is out of range.
    """
    if isinstance(value, str):
        return _members_in(value)
    return _in_range(value) if isinstance(value, (list, tuple)) and all(type(x) is int for x in value) else None


@lru_cache(maxsize=65536)
def _members_in(text: str) -> tuple[int, ...] | None:  # a thousand dumps hold the same texts
    if len(text) > MAX_MEMBERS_TEXT:
        raise BadDump(f"a group with more than {MAX_RANKS:,} ranks")
    return _in_range(numbers(text))


def _in_range(ranks: Iterable[int]) -> tuple[int, ...] | None:
    out = tuple(dict.fromkeys(ranks))
    if out and not (min(out) >= 0 and max(out) < MAX_RANKS):
        raise BadDump(f"a group with a rank out of range (0 to {MAX_RANKS - 1:,})")
    return out or None


def _groups(value: Any) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Return group name -> (description, members)."""
    out: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    if isinstance(value, dict):
        if len(value) > MAX_GROUPS:
            raise BadDump(f"{len(value):,} groups; at most {MAX_GROUPS:,} are read")
        for name, info in value.items():
            if isinstance(info, dict):
                out[short_text(info.get("name", name))] = (short_text(info.get("desc")), _members(info.get("ranks")))
            else:  # 1.2: group number -> ranks
                out[short_text(name)] = ("", _members(info))
    return out


def _status(value: Any) -> dict[str, tuple[int, int]]:
    """Return group number -> (last enqueued, last completed); groups without both are left out."""
    out: dict[str, tuple[int, int]] = {}
    if isinstance(value, dict) and len(value) <= MAX_GROUPS:
        for number, s in value.items():
            if isinstance(s, dict):
                enqueued = _counter(s.get("last_enqueued_collective"))
                completed = _counter(s.get("last_completed_collective"))
                if enqueued is not None and completed is not None:
                    out[short_text(number)] = enqueued, completed
    return out


def _counter(value: Any) -> int | None:
    """Return a counter, which JSON dumps hold as text; -1 before the first collective. None for anything else."""
    if isinstance(value, str):
        value = int(value) if _COUNTER.fullmatch(value) else None
    return value if is_count(value) or (type(value) is int and value == -1) else None
