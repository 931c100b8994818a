"""An open database of a run: queries, and a check that it is still the file that was opened."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from distdiag.store.checked import Connection
from distdiag.store.opening import ReadStatus, RunUnreadable, deleted, inode, rows, unreadable
from distdiag.store.rows import DdpRow, Row

_T = TypeVar("_T", bound=Row)


class Database:
    """A read-only connection. Not for use by two threads at once."""

    def __init__(self, path: Path, database: Path, con: Connection, note: str | None = None) -> None:
        self.path = path
        self.database = database
        self.note = note  # for people, about how it was opened
        self._con = con
        self._inode = inode(database)
        self._columns: dict[str, frozenset[str]] = {}

    def close(self) -> None:
        self._con.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def query(self, sql: str, args: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of any SELECT.

        Raises:
            RunUnreadable: locked, corrupt, or deleted since it was opened.
        """
        try:
            return rows(self._con, sql, args)
        except sqlite3.Error as e:
            raise unreadable(e, self.path, self.database) from e

    def check(self) -> None:
        """Check that the database is still the file that was opened.

        Raises:
            RunUnreadable: it was deleted or replaced under the reader.
        """
        now = inode(self.database)
        if now is None:
            raise deleted(self.path)
        if now != self._inode:
            text = f"{self.database} was replaced while it was open"
            raise RunUnreadable(ReadStatus.DELETED, text, "open the run again")

    def data_version(self) -> int:
        """Return a number that changes when another process has written."""
        return self.query("PRAGMA data_version")[0][0]

    def named(self, table: str, columns: Sequence[str]) -> list[str]:
        """Return SQL for columns of a table: "NULL" for those that the run lacks because an older version wrote it."""
        if table not in self._columns:
            found = frozenset(row[1] for row in self.query(f"PRAGMA table_info({table})"))
            if not found:  # no such table: the query reports it
                return [f"{table}.{c}" for c in columns]
            self._columns[table] = found
        return [f"{table}.{c}" if c in self._columns[table] else "NULL" for c in columns]

    def structs(self, kind: type[_T], sql: str, args: Sequence[Any] = (), fields: Sequence[str] = ()) -> list[_T]:
        """Return rows of a table as Structs (`sql` follows its name); a row that lacks a needed value is left out."""
        fields = fields or kind.__struct_fields__
        names = ", ".join(self.named(kind.TABLE, fields))
        found = []
        for row in self.query(f"SELECT {names} FROM {kind.TABLE} {sql}", args):
            known = {name: value for name, value in zip(fields, row, strict=True) if value is not None}
            with contextlib.suppress(msgspec.ValidationError):
                found.append(msgspec.convert(known, kind, strict=False))  # SQLite has no booleans, but 0 and 1
        return found

    def newest(self, kind: type[_T], key: str, t_s: float | None) -> list[_T]:
        """Return the newest row of each key, not after `t_s`."""
        table = kind.TABLE
        # only the last minute is read, so that the cost does not grow with the run
        newest = self.query(f"SELECT max(t_s) FROM {table} WHERE (?1 IS NULL OR t_s <= ?1)", (t_s,))[0][0]
        if newest is None:
            return []
        last = f"SELECT max(t_s), {key} FROM {table} WHERE t_s > ? AND t_s <= ? GROUP BY {key}"
        return self.structs(kind, f"WHERE (t_s, {key}) IN ({last}) ORDER BY {key}", (newest - 60.0, newest))

    def step_range(self, t_s: float | None = None) -> tuple[int, int] | None:
        """Return the first and the newest step with raw rows, not after `t_s`; None if there is none."""
        first, last = self.query("SELECT (SELECT min(step) FROM step), (SELECT max(step) FROM step)")[0]
        if first is None:
            return None
        if t_s is not None:
            # steps end in order, so a search over the key finds the last one before t_s
            low, high = first - 1, last
            while low < high:
                middle = (low + high + 1) // 2
                end = self.query("SELECT min(t_end_s) FROM step WHERE step = ?", (middle,))[0][0]
                if end is None or end <= t_s:
                    low = middle
                else:
                    high = middle - 1
            last = low
            if last < first:
                return None
        return first, last

    def ddp(self) -> list[DdpRow]:
        """Return the newest state of every DDP module, by rank; empty if none was measured."""
        if not self.query("SELECT 1 FROM sqlite_master WHERE name = 'ddp'"):
            return []
        return self.structs(DdpRow, "ORDER BY rank, model")
