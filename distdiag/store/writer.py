"""The single writer of run.db: rows are collected during a poll and written in one transaction by `commit()`.

A full disk or a read-only directory must not end the monitor and with it the record of a long job. So nothing here raises
after construction: rows that could not be written are kept (up to a bound), retried, and finally dropped and counted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distdiag import files
from distdiag.diagnosis.model.findings import Check, Finding
from distdiag.store import SCHEMA_VERSION
from distdiag.store import rows as kinds
from distdiag.store.checked import SCHEMA
from distdiag.store.frames import TABLE_COLUMNS, RankRow, pack
from distdiag.store.location import Location
from distdiag.store.rows import GroupRow, Row, StepTimesRow
from distdiag.store.thinning import Keeper
from distdiag.terms.ranks import fold_ranks

KEEP_BYTES = 2 * 2**30
RETRY_S = 1.0  # after a failed write
HEARTBEAT_S = 1.0
MAX_PENDING_ROWS = 200_000  # while the disk refuses: about 60 MB of step rows

_INT64 = 2**63


def _insert(kind: type[Row]) -> str:
    columns = TABLE_COLUMNS if kind is RankRow else kind.__struct_fields__
    return f"INSERT OR REPLACE INTO {kind.TABLE} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
_FRAME = "INSERT OR REPLACE INTO frame VALUES (?, ?, ?, ?)"
_EVENT = "INSERT INTO event VALUES (?, ?, ?, ?)"
_ROWS = {kind: _insert(kind) for kind in Row.__subclasses__()}
_RANK = _ROWS[RankRow]
_STEP_TIMES = "UPDATE step SET comm_ms = ?, exposed_ms = ? WHERE rank = ? AND step = ?"
_GROUP = "INSERT OR REPLACE INTO pgroup VALUES (?, ?, ?, ?, ?)"
_PROBE = "INSERT INTO probe VALUES (?, ?, ?, ?)"
_FINDING = """
INSERT INTO finding (key, kind, cause, severity, certainty, first_seen_s, detected_s, cleared_s, message, json)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET severity = excluded.severity, certainty = excluded.certainty,
  first_seen_s = coalesce(excluded.first_seen_s, first_seen_s), detected_s = coalesce(excluded.detected_s, detected_s),
  cleared_s = excluded.cleared_s, message = excluded.message, json = excluded.json
"""
# may be dropped, oldest first
_MANY = (kinds.StepRow, kinds.CollectiveRow, kinds.HostRow, kinds.ProcessRow, kinds.GpuRow, kinds.ScalarRow)
_BULK = frozenset({_FRAME, *(_ROWS[kind] for kind in _MANY)})

# what SQLite raises for a value that it cannot store: it costs the rest of its batch
_REFUSED = (
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    OverflowError,
    ValueError,
    TypeError,
)
_encode = msgspec.json.Encoder()


def _value(v: Any) -> Any:
    """Return a value that SQLite can store: unsigned 64-bit numbers (fingerprints) wrap to signed ones."""
    if isinstance(v, int) and not -_INT64 <= v < _INT64:
        return (v + _INT64) % (2 * _INT64) - _INT64
    return v


class Writer:
    """Writes one run's database."""

    def __init__(self, run_dir: Path | str, *, keep_bytes: int = KEEP_BYTES) -> None:
        """Open (or create) `RUN/run.db`, of at most `keep_bytes`; a disk that refuses is retried at each `commit()`."""
        self.run_dir = Path(run_dir)
        self.failed_writes = 0  # transactions so far
        self.dropped_rows = 0  # because the disk refused for too long
        self.last_error: str | None = None  # the newest; None once a write succeeded again
        self._con: sqlite3.Connection | None = None
        self._keeper = Keeper(keep_bytes)
        self._pending: list[tuple[str, list[tuple[Any, ...]]]] = []
        self._retry_at = self._beat_at = 0.0
        self._newest_t_s = 0.0
        self._checks: tuple[Check, ...] = ()
        self._closed = False
        with contextlib.suppress(OSError):
            files.make_run_directory(self.run_dir)
        self._location = Location(self.run_dir)
        if self._location.notice is not None:
            self.event(0.0, "store", *self._location.notice)
        if self._location.error is not None:
            self._failed(self._location.error)
        self.meta(
            schema_version=SCHEMA_VERSION,
            monitor_pid=os.getpid(),
            monitor_host=socket.gethostname(),
            monitor_ended=False,
        )
        self.commit()
        self._location.hold_reserve()

    @property
    def path(self) -> Path:
        return self._location.path

    # -- opening ----------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        if self._con is None:
            # autocommit: we begin transactions ourselves; the writer may be used from another thread
            # SQLite would follow a link; its own other files it opens with O_NOFOLLOW, and with the mode of this one
            os.close(files.open_own(self.path.parent, self.path.name, os.O_RDWR))
            con = sqlite3.connect(self.path, timeout=2.0, isolation_level=None, check_same_thread=False)
            try:
                con.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has effect only before the first table
                con.execute("PRAGMA journal_mode = WAL")
                con.execute("PRAGMA synchronous = NORMAL")
                con.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
                con.executescript(
                    f"BEGIN IMMEDIATE; {SCHEMA.read_text('utf-8')} COMMIT;"
                )  # a reader sees all tables or none
            except BaseException:
                con.close()
                raise
            self._con = con
        return self._con

    # -- rows of one poll -------------------------------------------------------------------------------------

    def _add(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        batch = list(rows)
        if batch:
            self._pending.append((sql, batch))

    def meta(self, **values: Any) -> None:
        """Set keys of table `meta`; None is stored as NULL, booleans as 0 and 1."""
        self._add(
            _META, [(k, None if v is None else str(int(v) if isinstance(v, bool) else v)) for k, v in values.items()]
        )

    def add(self, rows: Sequence[Row]) -> None:
        """Write rows of one type into its table; each replaces the row with its key."""
        if rows:
            kind = type(rows[0])
            values: Iterable[tuple[Any, ...]] = map(msgspec.structs.astuple, rows)
            if kind is RankRow:
                values = (v[: len(TABLE_COLUMNS)] for v in values)
            elif kind in (kinds.DdpRow, kinds.LoaderRow):  # of what a page has, some numbers are unsigned
                values = (tuple(map(_value, v)) for v in values)
            self._add(_ROWS[kind], values)

    def frame(self, t_s: float, state: str, state_text: str, rows: list[RankRow]) -> None:
        """Add a frame: the job's state, what follows it in the header ("no step for 31 s (usual 0.23 s)"), and every rank."""
        self._newest_t_s = max(self._newest_t_s, t_s)
        self._add(_FRAME, [(t_s, str(state), state_text, pack(rows))])
        self.meta(state=str(state))

    def step_times(self, rows: list[StepTimesRow]) -> None:
        """Add DDP's times to steps that are already written."""
        self._add(_STEP_TIMES, map(msgspec.structs.astuple, rows))

    def groups(self, rows: list[GroupRow]) -> None:
        self._add(_GROUP, ((g.name, g.description, g.backend, len(g.ranks), fold_ranks(g.ranks)) for g in rows))

    def finding(self, finding: Finding) -> None:
        """Insert a finding, or update the record with its key; known times are kept."""
        f = finding
        times = (f.first_seen_s, f.detected_s, f.cleared_s)
        head = (f.key, f.kind, f.cause, str(f.severity), str(f.certainty))
        self._add(_FINDING, [(*head, *times, f.message, _encode.encode(f).decode())])

    def checks(self, checks: tuple[Check, ...]) -> None:
        """Replace the list of what the diagnosis could judge so far, if it has changed."""
        if checks != self._checks:
            self._checks = checks
            self.meta(checks=_encode.encode(checks).decode())

    def probe(self, t_s: float, name: str, verdict: str, json_text: str) -> None:
        """Record the result of a probe that was measured during this run."""
        self._add(_PROBE, [(t_s, name, verdict, json_text)])

    def event(self, t_s: float, source: str, level: str, text: str) -> None:
        """Record a message of the monitor or the job about itself; `level` is info, warning or error."""
        self._add(_EVENT, [(t_s, source, level, text)])

    # -- writing ----------------------------------------------------------------------------------------------

    def commit(self) -> bool:
        """Write all collected rows in one transaction; True if none is left. Never raises."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_S
            self._pending = [(s, r) for s, r in self._pending if not (s is _META and r[0][0] == "heartbeat_unix_s")]
            self.meta(heartbeat_unix_s=round(time.time(), 3))
        if not self._pending:
            return True
        if now < self._retry_at:
            self._bound_pending()
            return False
        refused, dropped = None, 0
        try:
            con = self._open()
            con.execute("BEGIN IMMEDIATE")
            for sql, rows in self._pending:
                try:
                    con.executemany(sql, rows)
                except _REFUSED as e:  # our defect, not the disk's
                    refused, dropped = e, dropped + len(rows)
            con.execute("COMMIT")
        except Exception as e:
            self._rollback()
            self._failed(e)
            return False
        self._pending.clear()
        if refused is not None:
            self.dropped_rows += dropped
            self._failed(refused)
            return True
        if self.last_error is not None:
            last, self.last_error = self.last_error, None
            self.event(
                self._newest_t_s, "store", "warning",
                f"writing works again after {self.failed_writes} failures ({last}); rows dropped: {self.dropped_rows}",
            )  # fmt: skip
        try:
            for text in self._keeper.tick(con, self._newest_t_s):
                self.event(self._newest_t_s, "store", "info", text)
        except sqlite3.Error as e:
            self._rollback()
            self._failed(e)
        return True

    def _rollback(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._con is not None and self._con.in_transaction:
                self._con.execute("ROLLBACK")

    def _failed(self, error: Exception) -> None:
        self.failed_writes += 1
        self.last_error = f"{type(error).__name__}: {error}"
        self._retry_at = time.monotonic() + RETRY_S
        self._bound_pending()

    def _bound_pending(self) -> None:
        """Drop the oldest bulk rows, never findings, ranks, events or meta.

        A frame is as large as a row per rank, so only the newest eight are kept.
        """
        frames = [i for i, (sql, _) in enumerate(self._pending) if sql is _FRAME]
        give_up = set(frames[:-8])
        excess = sum(len(rows) for _, rows in self._pending) - MAX_PENDING_ROWS
        for i, (sql, rows) in enumerate(self._pending):
            if excess <= 0:
                break
            if sql in _BULK and i not in give_up:
                give_up.add(i)
                excess -= len(rows)
        self.dropped_rows += sum(len(self._pending[i][1]) for i in give_up)
        kept = [p for i, p in enumerate(self._pending) if i not in give_up]
        newest_meta: dict[str, tuple[Any, ...]] = {}
        newest_rank: dict[int, tuple[Any, ...]] = {}
        rest: list[tuple[str, list[tuple[Any, ...]]]] = []
        for sql, rows in kept:  # these replace each other: keep only the newest of each
            if sql is _META:
                newest_meta.update((r[0], r) for r in rows)
            elif sql is _RANK:
                newest_rank.update((r[0], r) for r in rows)
            else:
                rest.append((sql, rows))
        self._pending = rest
        self._add(_META, newest_meta.values())
        self._add(_RANK, newest_rank.values())

    def close(self) -> bool:
        """Write the last rows, fold the WAL into run.db, and move it into the run directory. Never raises.

        Afterwards run.db is one ordinary file that can be read on a read-only disk, unless a reader has it open now.
        Returns False if something could not be written (see `last_error`).
        """
        if self._closed:
            return self.last_error is None
        self._closed = True
        self._retry_at = 0.0
        self.meta(monitor_ended=True)
        ok = self.commit() and self.commit()  # the first may add an event
        self._location.release_reserve()
        if not ok:
            self._pending = [(sql, rows) for sql, rows in self._pending if sql not in _BULK]
            self._retry_at = 0.0
            ok = self.commit() and self.commit()
        con, self._con = self._con, None
        if con is not None:
            with contextlib.suppress(sqlite3.Error):
                con.execute("PRAGMA busy_timeout = 200")
                con.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                con.execute("PRAGMA journal_mode = DELETE")  # refused while readers are connected: then it stays WAL
            with contextlib.suppress(sqlite3.Error):
                con.close()
        try:
            self._location.bring_home()
        except OSError as e:
            self._failed(e)
            return False
        return ok

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
