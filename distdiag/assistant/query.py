"""One SELECT on a run's database, written by somebody who may have been misled: it can read the run, and nothing else.

The connection is read-only and refuses untrusted schemas (`store/checked.py`). Here SQLite's authorizer also refuses whatever is not
reading: PRAGMA, ATTACH, transactions, writes. Rows, bytes, CPU time and memory are limited. The query runs in a child process: SQLite
checks the time between its instructions, and one call of instr can take minutes.
"""

from __future__ import annotations

import math
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec

from distdiag import guard
from distdiag.errors import DistdiagError
from distdiag.store.checked import Connection, schema
from distdiag.store.reader import Run, open_run
from distdiag.terms.untrusted import cut

MOST_ROWS = 1000
MOST_CHARACTERS = 100_000  # of all values of an answer
MOST_CELL = 2000  # of one text
MOST_VALUE_BYTES = 1 << 20  # of a value inside the query; only frames have larger ones, and nobody can read those
MOST_HEAP_BYTES = 256 << 20  # of SQLite, in the whole process
CPU_S = 2.0
_LIMITS = guard.Limits(cpu_s=2 * CPU_S, memory_bytes=2 * MOST_HEAP_BYTES)  # for a call that SQLite does not interrupt
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_NOT = frozenset({"load_extension", "fts3_tokenizer"})


def tables() -> str:
    """Return the tables with their columns, one a line: `step(rank, step, epoch, …)`."""
    return "\n".join(f"{table}({', '.join(columns)})" for table, columns in schema().items())


class Rows(msgspec.Struct, frozen=True, tag=True):
    """The answer to a query; `truncated` if there are more rows."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why there is no answer."""

    message: str
    hint: str
    kind: str


_TOO_LONG = Refused(
    f"the query takes more than {CPU_S:g} s of CPU", "narrow it: WHERE step > …, or a range of ranks", "too_long"
)
_TOO_LARGE = Refused("the query needs too much memory", "select fewer columns and rows", "too_large")


def select(run_dir: Path, query: str, limit: int) -> Rows:
    """Return the rows of one SELECT on a run's database, at most `limit`; a wrong or forbidden one is an error."""

    def work(announce: guard.Announce) -> bytes:
        announce("ask", 0)
        try:
            with open_run(run_dir) as run:
                return msgspec.msgpack.encode(_select(run, query, limit))
        except DistdiagError as e:
            return msgspec.msgpack.encode(Refused(e.message, e.hint, e.kind))

    try:
        answer = msgspec.msgpack.decode(guard.run(work, _LIMITS), type=Rows | Refused)
    except guard.Died as e:
        if e.details:  # an error of ours
            raise
        answer = _TOO_LARGE if "memory" in e.reason else _TOO_LONG
    if isinstance(answer, Refused):
        raise DistdiagError(answer.message, answer.hint, kind=answer.kind)
    return answer


def _select(run: Run, query: str, limit: int) -> Rows | Refused:
    con = run._con
    refused: list[str] = []
    con.execute(f"PRAGMA hard_heap_limit = {MOST_HEAP_BYTES}")
    con.execute("PRAGMA temp_store = MEMORY")  # a sort writes no file
    con.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
    con.text_factory = lambda data: data.decode("utf-8", "replace")
    con.set_authorizer(_authorizer(refused))
    try:
        return _rows(con, query, max(1, min(limit, MOST_ROWS)))
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError, OverflowError) as e:
        return _reason(e, refused)
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


def _rows(con: Connection, query: str, limit: int) -> Rows:
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
    return Rows([cut(c[0], 200) for c in cursor.description], rows, more)


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, str):
        return cut(value, MOST_CELL)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _reason(error: Exception, refused: list[str]) -> Refused:
    text = str(error)
    if refused or "readonly" in text:
        return Refused("only SELECT is allowed", "the run is read-only: no PRAGMA, ATTACH or writes", "not_allowed")
    if "interrupted" in text:
        return _TOO_LONG
    if isinstance(error, MemoryError) or "too big" in text:
        return _TOO_LARGE
    hint = "`SELECT name, sql FROM main.sqlite_master` lists the tables"
    return Refused(f"SQLite: {cut(text, 300)}", hint, "bad_query")
