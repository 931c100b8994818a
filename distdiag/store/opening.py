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

from distdiag import files
from distdiag.errors import DistdiagError, ExitCode
from distdiag.store import SCHEMA_VERSION, rundir, unwritten
from distdiag.store.checked import Connection, fetch, harden
from distdiag.store.liveness import SILENT_S
from distdiag.terms.untrusted import visible

BUSY_TIMEOUT_S = 0.3
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
FOLDING_S = 0.5  # the writer copies its log in some hundredths of a second
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
    try:
        if database.exists() or database.is_symlink():
            return _regular(database)
        where = msgspec.json.decode(files.read(path, rundir.POINTER), type=dict[str, str])
    except PermissionError as e:
        raise _not_permitted(path, e) from None
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        if not path.is_dir():
            raise RunUnreadable(
                ReadStatus.DELETED, f"no run directory {path}", f"`{rundir.CREATE}` records a run"
            ) from None
        raise RunUnreadable(ReadStatus.MISSING, *unwritten.explain(path, f"{path} has no {rundir.DATABASE}")) from None
    local = Path(where.get("path", ""))
    if where.get("host") == socket.gethostname() and local.exists():
        return _regular(local)
    host, where_run = where.get("host", "?"), shlex.quote(str(path.absolute()))
    raise RunUnreadable(
        ReadStatus.ELSEWHERE,
        f"the database of {path} is on {host} ({local}) until the run ends",
        # quoted twice: the remote shell removes one level; a host name must not be an option of ssh
        f"`ssh {host} distdiag tui {shlex.quote(where_run)}`" if _HOST.fullmatch(host) else "open it on that host",
    )


def _not_permitted(path: Path, error: OSError) -> RunUnreadable:
    owner = files.owner_of_other(path)
    whose = f", and belongs to {owner}" if owner else ""
    return RunUnreadable(
        ReadStatus.UNREADABLE,
        f"{path} may not be read{whose}: {error.strerror or error}",
        f"its owner can share it: chmod -R go+rX {shlex.quote(str(path))}" if owner else "check its permissions",
    )


def _regular(database: Path) -> Path:
    """Return the path if it and the files that SQLite opens with it are regular; a FIFO could block the reader, and a link leave the run.

    Raises:
        RunUnreadable: one of them is not a regular file.
    """
    for end in ("", "-journal", "-wal", "-shm"):
        path = database.with_name(database.name + end)
        try:
            regular = S_ISREG(path.lstat().st_mode)
        except OSError:
            continue  # opening it reports the error
        if not regular:
            raise RunUnreadable(ReadStatus.CORRUPT, f"{path} is not a file", CORRUPT_HINT)
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
    quoted = _quoted(database)

    def attempt(options: str, exclusive: bool = False) -> Connection:
        con: Connection = sqlite3.connect(  # type: ignore[assignment]
            f"file:{quoted}?mode=ro{options}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            factory=Connection,
        )
        try:
            if exclusive:
                con.execute("PRAGMA locking_mode = EXCLUSIVE")
            rows(con, "SELECT count(*) FROM sqlite_master")
            harden(con, database)
        except BaseException:
            con.close()
            raise
        return con

    wal = database.with_name(database.name + "-wal")
    names_wal = _head(database, 20)[18:20] == b"\2\2"  # as its journal
    if (names_wal or wal.exists()) and _left_alone(database, wal):
        # SQLite would create its -wal and -shm files again, or write into them: a reader changes nothing
        return attempt("&vfs=unix-none", exclusive=True) if _has_frames(wal) else attempt("&immutable=1"), None
    try:
        return attempt(""), None
    except sqlite3.OperationalError as e:
        # a WAL database needs its -shm file, which cannot be created on a read-only disk
        if "locked" in str(e) or os.access(database.parent, os.W_OK) or not os.access(database, os.R_OK):
            raise
        note = "read without its newest rows: the directory is read-only" if size_of(wal) else None
        return attempt("&immutable=1"), note


def _head(path: Path, most: int) -> bytes:
    try:
        return files.read(path.parent, path.name, most)
    except OSError:
        return b""


def _has_frames(wal: Path) -> bool:
    """True if the first frame of a log is one of its header (sqlite.org/fileformat2.html): SQLite deletes a log without any when it closes it."""
    head = _head(wal, 56)
    return head[:3] == b"\x37\x7f\x06" and len(head) == 56 and head[16:24] == head[40:48]


def _left_alone(database: Path, wal: Path) -> bool:
    """True if no process has a WAL database open: nobody has written for a while, and nobody holds a lock on its index."""
    try:
        index = os.lstat(f"{database}-shm").st_ino
        if time.time() - max(os.lstat(path).st_mtime for path in (database, wal)) < SILENT_S:
            return False
    except FileNotFoundError:  # every process that has it open has both
        return True
    except OSError:
        return False
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return f":{index} " not in locks


def check_version(con: Connection, database: Path) -> None:
    """Refuse a run whose schema this version cannot read.

    Raises:
        RunUnreadable: an older or a newer distdiag wrote it, or the monitor has written nothing yet.
        sqlite3.Error: it is not a run.
    """
    if not con.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:  # the writer makes all tables at once
        raise _empty(database)
    version = con.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    if version is None:
        raise _empty(database)
    found = int(version[0]) if re.fullmatch(r"[0-9]{1,6}", str(version[0])) else 0
    if found == SCHEMA_VERSION:
        return
    status, whose, hint = ReadStatus.NEWER, "a newer", "read it with a newer distdiag"
    if found < SCHEMA_VERSION:
        wrote = (con.execute("SELECT value FROM meta WHERE key = 'distdiag'").fetchone() or ["?"])[0]
        status, whose, hint = ReadStatus.OLDER, "an older", f"read it with distdiag {wrote}"
    text = f"{database} was written by {whose} distdiag (schema {found}, this one reads {SCHEMA_VERSION})"
    raise RunUnreadable(status, text, hint)


def _empty(database: Path) -> RunUnreadable:
    return RunUnreadable(ReadStatus.MISSING, *unwritten.explain(database.parent, f"{database} is empty"))


def _quoted(database: Path) -> str:
    return database.absolute().as_posix().replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def unreadable(error: sqlite3.Error, path: Path, database: Path) -> RunUnreadable:
    text = str(error)
    if not database.exists():
        return deleted(path)
    if "locked" in text or "busy" in text:
        return RunUnreadable(
            ReadStatus.LOCKED,
            f"{database} is locked by another process",
            f"try again; `fuser {shlex.quote(str(database))}` names who holds it",
        )
    if "no such table" in text or "no such column" in text:
        return RunUnreadable(
            ReadStatus.OLDER,
            f"{database} is not a run of this version ({text})",
            "was it written by an older distdiag?",
        )
    if not os.access(database, os.R_OK):
        return _not_permitted(path, PermissionError(13, os.strerror(13)))
    if "malformed" in text or "not a database" in text or "corrupt" in text or "disk image" in text:
        return RunUnreadable(ReadStatus.CORRUPT, f"{database} is damaged: {text}", CORRUPT_HINT)
    hint = "check its permissions and the disk"
    if "readonly" in text:  # SQLite undoes it for whoever may write; a reader changes nothing
        hint = f"its writer was killed as it closed the run: `sqlite3 {shlex.quote(str(database))} .tables` undoes the rest"
    return RunUnreadable(ReadStatus.UNREADABLE, f"cannot read {database}: {text}", hint)


def deleted(path: Path) -> RunUnreadable:
    hint = "`distdiag tui RUN` opens another run"
    return RunUnreadable(ReadStatus.DELETED, f"{path} was deleted while it was open", hint)


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
