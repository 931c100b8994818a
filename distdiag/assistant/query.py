"""One SELECT on a run's database, written by somebody who may have been misled: it can read the run, and nothing else.

The connection is read-only and refuses untrusted schemas (`store/checked.py`). Here SQLite's authorizer also refuses whatever is not
reading: PRAGMA, ATTACH, transactions, writes. Rows, bytes, CPU time and memory are limited.
"""

from __future__ import annotations

import math
import sqlite3
import time
from typing import Any

from distdiag.errors import DistdiagError
from distdiag.store.checked import Connection, schema
from distdiag.store.reader import Run
from distdiag.terms.untrusted import cut

MOST_ROWS = 1000
MOST_CHARACTERS = 100_000  # of all values of an answer
MOST_CELL = 2000  # of one text
MOST_VALUE_BYTES = 1 << 20  # of a value inside the query; only frames have larger ones, and nobody can read those
MOST_HEAP_BYTES = 256 << 20  # of SQLite, in the whole process
CPU_S = 2.0
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_NOT = frozenset({"load_extension", "fts3_tokenizer"})


def tables() -> str:
    """Return the tables with their columns, one a line: `step(rank, step, epoch, …)`."""
    return "\n".join(f"{table}({', '.join(columns)})" for table, columns in schema().items())


def select(run: Run, query: str, limit: int) -> dict[str, Any]:
    """Return `columns` and `rows` of one SELECT, at most `limit` of them; `truncated` if there are more.

    Raises:
        DistdiagError: it is not allowed, wrong, or exceeds the limits.
    """
    con = run._con
    limit = max(1, min(limit, MOST_ROWS))
    refused: list[str] = []
    con.execute(f"PRAGMA hard_heap_limit = {MOST_HEAP_BYTES}")
    con.execute("PRAGMA temp_store = MEMORY")  # a sort writes no file
    con.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
    con.text_factory = lambda data: data.decode("utf-8", "replace")
    con.set_authorizer(_authorizer(refused))
    try:
        return _rows(con, query, limit)
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError, OverflowError) as e:
        raise _error(e, refused) from None
    finally:
        con.until_s = math.inf
        con.set_authorizer(None)


def _authorizer(refused: list[str]) -> Any:
    def allow(action: int, first: str | None, second: str | None, *_: Any) -> int:
        if action in _READS and not (action == sqlite3.SQLITE_FUNCTION and second in _NOT):
            return sqlite3.SQLITE_OK
        refused.append(str(first))
        return sqlite3.SQLITE_DENY

    return allow


def _rows(con: Connection, query: str, limit: int) -> dict[str, Any]:
    con.until_s = time.thread_time() + CPU_S
    cursor = con.execute(query)
    if cursor.description is None:
        raise sqlite3.Warning("it is no SELECT")
    rows: list[list[Any]] = []
    left, more = MOST_CHARACTERS, False
    for row in cursor:
        values = [_value(v) for v in row]
        left -= sum(len(v) if isinstance(v, str) else 8 for v in values)
        if more := len(rows) == limit or left < 0:
            break
        rows.append(values)
    return {"columns": [cut(c[0], 200) for c in cursor.description], "rows": rows, "truncated": more}


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, str):
        return cut(value, MOST_CELL)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _error(error: Exception, refused: list[str]) -> DistdiagError:
    text = str(error)
    if refused or "readonly" in text:
        return DistdiagError(
            "only SELECT is allowed", "the run is read-only: no PRAGMA, ATTACH or writes", kind="not_allowed"
        )
    if "interrupted" in text:
        return DistdiagError(
            f"the query takes more than {CPU_S:g} s of CPU",
            "narrow it: WHERE step > …, or a range of ranks",
            kind="too_long",
        )
    if isinstance(error, MemoryError) or "too big" in text:
        return DistdiagError("the query needs too much memory", "select fewer columns and rows", kind="too_large")
    return DistdiagError(
        f"SQLite: {cut(text, 300)}", "`SELECT name, sql FROM main.sqlite_master` lists the tables", kind="bad_query"
    )
