"""Query an untrusted database: with limits on time and memory, and with checked types.

SQLite stores any type in any column. A damaged or crafted file can have endless views, pages that contain themselves, and
text in number columns. Readers see each table through a temporary view of its name, so that no query, with whatever expression,
meets a value of the wrong type: it is NULL there, and a row whose key is wrong does not exist.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from distdiag.guard import stored_bytes
from distdiag.terms.untrusted import MAX_INT, MAX_RANKS

QUERY_S, QUERY_S_PER_BYTE = 3.0, 2e-7  # CPU time of one query: a scan takes 0.01 µs a byte on a slow core
STEPS = 200_000  # of SQLite's virtual machine between two checks of the clock: some milliseconds
MAX_VALUE_BYTES = 64 << 20  # of one text or blob; the largest frames have some megabytes
BATCH_ROWS = 5_000
SLACK_BYTES = 1 << 20
SCHEMA = Path(__file__).with_name("schema.sql")

_FINITE = "BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308"
_IS: dict[str, str] = {  # by declared type: true for a value that readers may see
    "INTEGER": f"typeof({{0}}) = 'integer' AND {{0}} BETWEEN -{MAX_INT} AND {MAX_INT}",
    "REAL": f"typeof({{0}}) IN ('real', 'integer') AND {{0}} {_FINITE}",
    "TEXT": "typeof({0}) = 'text'",
    "BLOB": "typeof({0}) = 'blob'",
}
_MAY_BE_INFINITE = frozenset({"loss", "value"})  # computed by the job
_RANK = f"{{0}} BETWEEN 0 AND {MAX_RANKS - 1}"
# what a row needs beyond its primary key
_NEEDED = {"collective": ("op",), "scalar": ("rank", "name"), "event": ("source", "level", "text"), "probe": ("t_s", "name", "verdict", "json"), "finding": ("json",), "host": ("host",)}  # fmt: skip


class Connection(sqlite3.Connection):
    """A connection whose queries are limited; see `harden`."""

    cpu_s: float = QUERY_S
    file: Path | None = None
    held_bytes: int = 0
    until_s: float = math.inf


@cache
def schema() -> dict[str, dict[str, tuple[str, bool]]]:
    """Return table -> column -> (declared type, True if a row needs it), by schema.sql."""
    con = sqlite3.connect(":memory:")
    try:
        con.executescript(SCHEMA.read_text("utf-8"))
        tables = [n for (n,) in con.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            t: {r[1]: (r[2], bool(r[5]) or r[1] in _NEEDED.get(t, ())) for r in con.execute(f"PRAGMA table_info({t})")}
            for t in tables
        }
    finally:
        con.close()


def _view(table: str, columns: Sequence[str], rowid: bool) -> str:
    """Return SQL for a view that hides what is not of its declared type.

    Columns that a row needs are left as they are, so that SQLite finds their index through the view.
    """
    declared = schema()[table]
    shown, conditions = ["rowid AS rowid"] if rowid else [], []
    for name in columns:
        kind, needed = declared.get(name, ("", False))
        valid = _IS.get(kind, "1").format(name)
        if kind == "REAL" and name in _MAY_BE_INFINITE:
            valid = f"typeof({name}) IN ('real', 'integer')"
        if name == "rank" and needed:
            valid = f"typeof(rank) = 'integer' AND {_RANK.format(name)}"
        if needed:
            conditions.append(valid)
        shown.append(f'"{name}"' if needed or not kind else f'CASE WHEN {valid} THEN {name} END AS "{name}"')
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"CREATE TEMP VIEW {table} AS SELECT {', '.join(shown)} FROM main.{table}{where}"


def _size(database: Path) -> int:
    total = SLACK_BYTES
    for p in (database, database.with_name(database.name + "-wal")):
        with contextlib.suppress(OSError):
            total += stored_bytes(p)
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
    con.execute("BEGIN")  # the tables of one moment: the writer may be making them
    found = fetch(con, "SELECT lower(name), type, sql FROM main.sqlite_master WHERE type IN ('table', 'view')")
    stored = {name: (kind, str(sql)) for name, kind, sql in found}  # SQLite's names have no case
    for name in schema():
        columns = fetch(con, f"PRAGMA main.table_xinfo({name})")
        if not columns:
            continue
        kind, sql = stored.get(name, ("", ""))
        if kind != "table" or not sql.startswith("CREATE TABLE "):
            raise sqlite3.DatabaseError(f"malformed: {name} is no table")
        if any(r[6] for r in columns):
            raise sqlite3.DatabaseError(f"malformed: {name} has computed columns")
        names = [str(r[1]).lower() for r in columns]
        if any('"' in n or n == "rowid" for n in names):
            raise sqlite3.DatabaseError(f"malformed: {name} has columns that no version has")
        con.execute(_view(name, names, "without rowid" not in sql.lower()))
    con.execute("COMMIT")


def fetch(con: Connection, sql: str, args: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
    """Return all rows of a SELECT.

    Raises:
        sqlite3.Error: from SQLite, or if the query exceeds its limits.
    """
    con.until_s = time.thread_time() + con.cpu_s
    try:
        cursor = con.execute(sql, args)
        rows: list[tuple[Any, ...]] = []
        total = 0
        while batch := cursor.fetchmany(BATCH_ROWS):
            total += 2 * len(batch) + sum(len(v) for row in batch for v in row if type(v) is str or type(v) is bytes)
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
