"""Query an untrusted database: with limits on time and memory, and with checked types.

SQLite stores any type in any column. A damaged or crafted file can have endless views, pages that contain themselves, and
text in number columns. Readers get None instead of a value of the wrong type.
"""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

QUERY_S, QUERY_S_PER_BYTE = 3.0, 2e-7  # CPU time of one query: a scan takes 0.01 µs a byte on a slow core
STEPS = 200_000  # of SQLite's virtual machine between two checks of the clock: some milliseconds
MAX_VALUE_BYTES = 64 << 20  # of one text or blob; the largest frames have some megabytes
BATCH_ROWS = 5_000
SLACK_BYTES = 1 << 20
SCHEMA = Path(__file__).with_name("schema.sql")

_ALLOWED: dict[str, frozenset[type]] = {
    "INTEGER": frozenset({int, type(None)}),
    "REAL": frozenset({int, float, type(None)}),
    "TEXT": frozenset({str, type(None)}),
    "BLOB": frozenset({bytes, type(None)}),
}
_ANY = frozenset({int, float, str, bytes, type(None)})
_MAY_BE_INFINITE = frozenset({"loss", "value"})  # computed by the job
_COLUMN = re.compile(r"(?:\w+\.)?(\w+)|(?:max|min)\((\w+)\)")  # `step.rank`, `max(t_s)`; not other expressions


class Connection(sqlite3.Connection):
    """A connection whose queries are limited; see `harden`."""

    cpu_s: float = QUERY_S
    file: Path | None = None
    held_bytes: int = 0
    until_s: float = math.inf


@cache
def schema() -> dict[str, dict[str, str]]:
    """Return table -> column -> declared type, by schema.sql."""
    con = sqlite3.connect(":memory:")
    try:
        con.executescript(SCHEMA.read_text())
        tables = [n for (n,) in con.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {t: {r[1]: r[2] for r in con.execute(f"PRAGMA table_info({t})")} for t in tables}
    finally:
        con.close()


@cache
def _types() -> dict[str, frozenset[type]]:
    """Return column -> Python types that a query may return. A column name means the same in all tables."""
    out: dict[str, frozenset[type]] = {}
    for columns in schema().values():
        for name, declared in columns.items():
            out[name] = out.get(name, frozenset()) | _ALLOWED.get(declared, _ANY)
    return out


def _size(database: Path) -> int:
    """Return the bytes of a database and its log."""
    total = SLACK_BYTES
    for p in (database, database.with_name(database.name + "-wal")):
        with contextlib.suppress(OSError):
            total += p.stat().st_size
    return total


def harden(con: Connection, database: Path) -> None:
    """Limit the queries of a connection by the size of its file, and check its schema.

    Raises:
        sqlite3.DatabaseError: one of our tables is a view, or has computed columns.
    """
    con.execute("PRAGMA trusted_schema = OFF")
    con.execute("PRAGMA cell_size_check = ON")
    con.execute("PRAGMA mmap_size = 0")
    con.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    con.file, con.held_bytes = database, _size(database)
    con.cpu_s = QUERY_S + con.held_bytes * QUERY_S_PER_BYTE
    con.set_progress_handler(lambda: time.thread_time() > con.until_s, STEPS)
    ours = schema()
    found = fetch(con, "SELECT name, type, sql FROM sqlite_master WHERE type IN ('table', 'view') LIMIT 1000")
    for name, kind, sql in found:
        if name in ours and (kind != "table" or "virtual" in str(sql)[:200].lower()):
            raise sqlite3.DatabaseError(f"malformed: {name} is no table")
        if name in ours and any(r[6] for r in fetch(con, f"PRAGMA table_xinfo({name})")):
            raise sqlite3.DatabaseError(f"malformed: {name} has computed columns")


def fetch(con: Connection, sql: str, args: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
    """Return all rows of a SELECT, with None for values that are not of their column's type.

    Raises:
        sqlite3.Error: from SQLite, or if the query exceeds its limits.
    """
    con.until_s = time.thread_time() + con.cpu_s
    try:
        cursor = con.execute(sql, args)
        names = [d[0] for d in cursor.description or ()]
        rows: list[tuple[Any, ...]] = []
        total = 0
        while batch := cursor.fetchmany(BATCH_ROWS):
            batch, size = _checked(names, batch)
            total += size
            if con.file is not None and total > con.held_bytes:
                con.held_bytes = _size(con.file)  # a live run grows
                if total > con.held_bytes:
                    raise sqlite3.DatabaseError("malformed: it returns more than the file holds")
            rows += batch
        return rows
    except sqlite3.OperationalError as e:
        if "interrupted" in str(e):
            raise sqlite3.DatabaseError(f"malformed: a query takes more than {con.cpu_s:.0f} s") from e
        if "decode" in str(e) and con.text_factory is str:  # bytes that are not UTF-8
            con.text_factory = lambda b: b.decode("utf-8", "replace")
            return fetch(con, sql, args)
        raise
    except UnicodeDecodeError as e:  # Python decodes SQLite's message, which quotes the file
        raise sqlite3.DatabaseError("malformed: SQLite's message about it is not UTF-8") from e
    finally:
        con.until_s = math.inf


def _checked(names: list[str], rows: list[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], int]:
    """Return the rows with checked values, and the least number of bytes that they take in the file."""
    types = _types()
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    size = 2 * len(rows)
    changed = False
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        m = _COLUMN.fullmatch(name)
        base = (m[1] or m[2]) if m else ""
        allowed = types.get(base, _ANY)
        seen = set(map(type, column))
        if seen & {str, bytes}:
            size += sum(len(v) for v in column if type(v) is str or type(v) is bytes)
        infinite = float in seen and base not in _MAY_BE_INFINITE and (math.inf in column or -math.inf in column)
        if infinite or not seen <= allowed:
            changed = True
            columns[i] = [v if type(v) in allowed and v not in (math.inf, -math.inf) else None for v in column]
    return (list(zip(*columns, strict=True)) if changed else rows), size
