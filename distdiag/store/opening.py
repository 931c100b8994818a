"""Find and open a run's database read-only; one error for each way in which that fails."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sqlite3
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from stat import S_ISREG
from typing import Any

import msgspec

from distdiag.errors import DistdiagError, ExitCode
from distdiag.store import SCHEMA_VERSION, rundir
from distdiag.store.checked import Connection, fetch, harden
from distdiag.terms.untrusted import visible

BUSY_TIMEOUT_S = 0.3
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
FOLDING_S = 0.5  # the writer copies its log in some hundredths of a second
# the last bytes of a journal that names one (sqlite.org/fileformat2.html)
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
CORRUPT_HINT = "`sqlite3 run.db .recover` may save the rows; flight_recorder/ and stacks/ are separate files"


class ReadStatus(StrEnum):
    """Why a run cannot be read."""

    MISSING = "missing"  # the monitor has not created run.db yet
    LOCKED = "locked"  # another process holds it; try again
    CORRUPT = "corrupt"
    OLDER = "older"  # written by an older distdiag whose schema this one cannot read
    NEWER = "newer"
    DELETED = "deleted"  # the run directory went away while it was being read
    ELSEWHERE = "elsewhere"  # kept on another host's local disk while the run lasts
    UNREADABLE = "unreadable"  # permissions, I/O errors


class RunUnreadable(DistdiagError):
    """A run that cannot be read; `status` has the reason, for screens that try again."""

    def __init__(self, status: ReadStatus, message: str, hint: str) -> None:
        code = ExitCode.NO_DATA if status in (ReadStatus.MISSING, ReadStatus.DELETED) else ExitCode.USAGE
        super().__init__(visible(message), visible(hint), code, f"run_{status}")
        self.status = status


def locate(path: Path) -> Path:
    """Return the database of a run directory: in it, or where its pointer file points to."""
    database = path / rundir.DATABASE
    if database.exists():
        return _regular(database)
    try:
        where = msgspec.json.decode((path / rundir.POINTER).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        if not path.is_dir():
            raise RunUnreadable(
                ReadStatus.DELETED, f"no run directory {path}", f"`{rundir.CREATE}` records a run"
            ) from None
        raise RunUnreadable(
            ReadStatus.MISSING,
            f"{path} has no {rundir.DATABASE} yet",
            "the job is starting; was it started with `-m distdiag.run`, or does it call distdiag.attach()?",
        ) from None
    local = Path(where.get("path", ""))
    if where.get("host") == socket.gethostname() and local.exists():
        return _regular(local)
    host, where_run = where.get("host", "?"), str(path.absolute())
    where_run = where_run if shlex.quote(where_run) == where_run else shlex.quote(where_run)
    raise RunUnreadable(
        ReadStatus.ELSEWHERE,
        f"the database of {path} is on {host} ({local}) until the run ends",
        # quoted twice: the remote shell removes one level; a host name must not be an option of ssh
        f"`ssh {host} distdiag tui {shlex.quote(where_run)}`" if _HOST.fullmatch(host) else "open it on that host",
    )


def _regular(database: Path) -> Path:
    """Return the path if it is a regular file; others (a FIFO) could block the reader.

    Raises:
        RunUnreadable: it is not a regular file.
    """
    try:
        regular = S_ISREG(database.stat().st_mode)
    except OSError:
        return database  # opening it reports the error
    if not regular:
        raise RunUnreadable(ReadStatus.CORRUPT, f"{database} is not a file", CORRUPT_HINT)
    return database


def rows(con: Connection, sql: str, args: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
    """Return all rows of a SELECT.

    While the writer copies its log into the file, SQLite reports "attempt to write a readonly database" to readers. Then
    the query is repeated.

    Raises:
        sqlite3.Error: any other error, or this one for longer than `FOLDING_S`.
    """
    end = time.monotonic() + FOLDING_S
    while True:
        try:
            return fetch(con, sql, args)
        except sqlite3.OperationalError as e:
            if "readonly" not in str(e) or time.monotonic() > end:
                raise
        time.sleep(0.02)


def connect(database: Path) -> tuple[Connection, str | None]:
    """Return a read-only connection with limits, and a note if it does not see the newest rows.

    Raises:
        sqlite3.Error: it cannot be opened, or its schema cannot be trusted.
    """
    quoted = database.absolute().as_posix().replace("%", "%25").replace("?", "%3f").replace("#", "%23")

    def attempt(options: str) -> Connection:
        con: Connection = sqlite3.connect(  # type: ignore[assignment]
            f"file:{quoted}?{options}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            factory=Connection,
        )
        try:
            rows(con, "SELECT count(*) FROM sqlite_master")
            harden(con, database)
        except BaseException:
            con.close()
            raise
        return con

    try:
        return attempt("mode=ro"), None
    except sqlite3.OperationalError as e:
        if "readonly" in str(e) and _roll_back(database, quoted):
            return attempt("mode=ro"), None
        # a WAL database needs its -shm file, which cannot be created on a read-only disk
        wal = database.with_name(database.name + "-wal")
        if "locked" in str(e) or os.access(database.parent, os.W_OK) or not os.access(database, os.R_OK):
            raise
        note = "read without its newest rows: the directory is read-only" if size_of(wal) else None
        return attempt("mode=ro&immutable=1"), note


def check_version(con: Connection, database: Path) -> None:
    """Refuse a run whose schema this version cannot read.

    Raises:
        RunUnreadable: an older or a newer distdiag wrote it, or the monitor has written nothing yet.
        sqlite3.Error: it is not a run.
    """
    version = con.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    if version is None:
        raise _empty(database)
    found = int(version[0]) if re.fullmatch(r"[0-9]{1,6}", str(version[0])) else 0
    if found == SCHEMA_VERSION:
        return
    status, whose, hint = ReadStatus.NEWER, "a newer", "`pip install -U distdiag`"
    if found < SCHEMA_VERSION:
        wrote = (con.execute("SELECT value FROM meta WHERE key = 'distdiag'").fetchone() or ["?"])[0]
        status, whose, hint = (
            ReadStatus.OLDER,
            "an older",
            f"`pip install {shlex.quote(f'distdiag=={wrote}')}` reads it",
        )
    text = f"{database} was written by {whose} distdiag (schema {found}, this one reads {SCHEMA_VERSION})"
    raise RunUnreadable(status, text, hint)


def _empty(database: Path) -> RunUnreadable:
    return RunUnreadable(ReadStatus.MISSING, f"{database} is empty so far", "the monitor is just starting; try again")


def _roll_back(database: Path, quoted: str) -> bool:
    """Undo what a monitor that was killed while it closed the run has left half done; False if it cannot be.

    A scheduler that ends a job kills what is left of it. SQLite undoes an unfinished transaction for whoever may write, not
    for a read-only connection, and only if no process has the database locked for writing. A run may come from someone else: a
    journal that names a super-journal, which ours never does, could make SQLite delete any file.
    """
    journal = database.with_name(database.name + "-journal")
    try:
        found = database.lstat(), journal.lstat()
        if any(not S_ISREG(st.st_mode) or st.st_uid != os.geteuid() for st in found) or not found[1].st_size:
            return False
        with journal.open("rb") as file:
            file.seek(max(0, found[1].st_size - len(_SUPER_JOURNAL)))
            if file.read() == _SUPER_JOURNAL:
                return False
        con = sqlite3.connect(f"file:{quoted}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    except (OSError, sqlite3.Error):
        return False
    try:
        con.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        return False
    finally:
        con.close()
    return not size_of(journal)


def unreadable(error: sqlite3.Error, path: Path, database: Path) -> RunUnreadable:
    """Return the error for what SQLite reports."""
    text = str(error)
    if not database.exists():
        return RunUnreadable(
            ReadStatus.DELETED, f"{path} was deleted while it was open", "`distdiag tui RUN` opens another run"
        )
    if "locked" in text or "busy" in text:
        return RunUnreadable(
            ReadStatus.LOCKED,
            f"{database} is locked by another process",
            f"try again; `fuser {shlex.quote(str(database))}` names who holds it",
        )
    if "no such table" in text or "no such column" in text:
        if not size_of(database):
            return _empty(database)
        return RunUnreadable(
            ReadStatus.OLDER,
            f"{database} is not a run of this version ({text})",
            "was it written by an older distdiag?",
        )
    if "malformed" in text or "not a database" in text or "corrupt" in text or "disk image" in text:
        return RunUnreadable(ReadStatus.CORRUPT, f"{database} is damaged: {text}", CORRUPT_HINT)
    return RunUnreadable(ReadStatus.UNREADABLE, f"cannot read {database}: {text}", "check its permissions and the disk")


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def inode(path: Path) -> tuple[int, int] | None:
    try:
        st = path.stat()
    except OSError:
        return None
    return st.st_dev, st.st_ino
