"""Checks the content of a dump: types, ranges and sizes, before anything else reads it.

The fields are described in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp. What a rule needs of every entry is
checked here; optional fields are checked by the functions of `entries` that read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from distdiag.sources.dumps.pickles import BadDump
from distdiag.terms.untrusted import MAX_INT, MAX_RANKS, MAX_TEXT, is_count, is_rank, numbers, short_text

MAX_ENTRIES = 1 << 20  # the largest ring in use has some 20,000
MAX_GROUPS = 1 << 16
_COUNTER = re.compile(r"-1|[0-9]{1,18}")
MAX_MEMBERS_TEXT = 8 * MAX_RANKS  # characters of "[0, 1, …]"


@dataclass(slots=True)
class DumpFile:
    """One rank's dump as read: builtin containers only.

    Attributes:
        rank: Rank from the content or the file name; None until known.
        groups: Group name -> (description, global ranks or None where not recorded).
        status: The recorder's own group number -> (last enqueued, last completed). NCCL's number counts collectives or messages,
            whichever came last; gloo's counts both.
        entries: Entries as recorded, oldest first; the oldest may be overwritten.
    """

    path: Path
    rank: int | None
    version: str
    groups: dict[str, tuple[str, tuple[int, ...] | None]]
    status: dict[str, tuple[int, int]]
    entries: list[dict[str, Any]]
    modified_ns: int = 0
    damaged: int = 0  # entries that were left out: they lack a group, number or name


def parse(path: Path, content: Any) -> DumpFile:
    """Return the dump in decoded JSON or pickle, format version 1.x or 2.x.

    Raises:
        BadDump: it is something else, or exceeds the limits of any real dump.
    """
    if isinstance(content, dict) and "entries" not in content and isinstance(content.get("dump"), dict):
        content = {**content["dump"], "rank": content.get("rank")}
    if isinstance(content, list):  # torch 2.1 and 2.2: only the list of entries
        content = {"entries": content, "version": "1.0"}
    if not isinstance(content, dict) or not ("entries" in content or "pg_status" in content):
        raise BadDump("not a flight-recorder dump: no entries")
    entries = content.get("entries")
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries[:1] + entries[-1:]):
        raise BadDump("not a flight-recorder dump: its entries are no list of records")
    if len(entries) > MAX_ENTRIES:
        raise BadDump(f"{len(entries):,} entries; no recorder keeps more than {MAX_ENTRIES:,}")
    damaged = 0
    if not is_modern(entries):
        entries, damaged = modern(entries)
    rank = content.get("rank")
    if type(rank) is int and rank >= MAX_RANKS:
        raise BadDump(f"its rank is out of range (0 to {MAX_RANKS - 1:,})")
    return DumpFile(
        path=path,
        rank=rank if is_rank(rank) else None,
        version=short_text(content.get("version")),
        groups=_groups(content.get("pg_config")),
        status=_status(content.get("pg_status")),
        entries=entries,
        damaged=damaged,
    )


# -- groups --------------------------------------------------------------------------------------------------------------

_members_of: dict[str, tuple[int, ...] | None] = {}  # a thousand dumps hold the same texts


def _members(value: Any) -> tuple[int, ...] | None:
    """Return the ranks in `[0, 1]`, a list or its text, in their order; None if there are none or it is not such a list.

    Raises:
        BadDump: a rank is out of range.
    """
    if isinstance(value, str):
        if value not in _members_of:
            if len(value) > MAX_MEMBERS_TEXT:
                raise BadDump(f"a group with more than {MAX_RANKS:,} ranks")
            if len(_members_of) > 65536:
                _members_of.clear()
            _members_of[value] = _in_range(numbers(value))
        return _members_of[value]
    if isinstance(value, (list, tuple)) and all(type(x) is int for x in value):
        return _in_range(value)
    return None


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


# -- entries -------------------------------------------------------------------------------------------------------------

# of the last three only truth or equality is used, which every value supports
_needed = itemgetter("process_group", "collective_seq_id", "p2p_seq_id", "profiling_name", "is_p2p", "state", "retired")


def is_modern(entries: list[dict[str, Any]]) -> bool:
    """True if every entry has the fields of 2.x, of the right type and in range.

    Checks column by column, so that the loops run in C: 0.1 s for 200,000 entries; a check of each entry would take a second.
    """
    if not entries:
        return True
    try:
        groups, seqs, p2p_seqs, names, *_ = zip(*map(_needed, entries), strict=True)
    except (KeyError, TypeError, IndexError):
        return False
    if not set(map(type, groups)) <= {tuple, list} or set(map(len, groups)) != {2}:
        return False
    texts = list(chain.from_iterable(groups))  # types first: hashing a nested tuple may overflow the stack
    if set(map(type, texts)) != {str} or set(map(type, names)) != {str}:
        return False
    if max(map(len, {*texts, *names})) > MAX_TEXT:
        return False
    return all(set(map(type, column)) == {int} and min(column) >= 0 and max(column) < MAX_INT
               for column in (seqs, p2p_seqs))  # fmt: skip


def modern(entries: list[Any]) -> tuple[list[dict[str, Any]], int]:
    """Return entries of any version with the fields of 2.x, and how many were left out.

    Left out are those without a group, a number or a name.
    """
    out, damaged = [], 0
    for old in entries:
        e = dict(old) if isinstance(old, dict) else {}
        name = e.get("profiling_name")
        group = e.get("process_group", e.get("pg_name", e.get("pg_id")))
        number = e.get("collective_seq_id", e.get("seq_id"))
        if isinstance(group, (list, tuple)):
            known = len(group) == 2 and all(_is_name(x) for x in group)
            group = (str(group[0]), str(group[1])) if known else None
        else:
            group = (str(group), "") if _is_name(group) else None
        if not isinstance(name, str) or len(name) > MAX_TEXT or group is None or not is_count(number):
            damaged += 1
            continue
        e["process_group"], e["collective_seq_id"] = group, number
        e["is_p2p"] = bool(e.get("is_p2p", name.rpartition(":")[2].startswith(("send ", "recv "))))
        if not is_count(e.get("p2p_seq_id")):
            e["p2p_seq_id"] = number if e["is_p2p"] else 0
        e["retired"] = e.get("retired") is True
        e.setdefault("state", "completed" if e["retired"] else "scheduled")
        out.append(e)
    return out, damaged


def _is_name(value: Any) -> bool:
    return is_count(value) or (type(value) is str and len(value) <= MAX_TEXT)
