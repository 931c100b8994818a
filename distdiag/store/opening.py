"""Finding and opening a run's database read-only, and a clear word for each way in which that fails."""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from distdiag.errors import DistdiagError, ExitCode
from distdiag.store import rundir

BUSY_TIMEOUT_S = 0.3
FOLDING_S = 0.5  # the writer needs some hundredths for it
CORRUPT_HINT = "`sqlite3 run.db .recover` may save the rows; flight_recorder/ and stacks/ beside it are separate files"


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
    """A run that is there but cannot be read; `status` says why, for a screen that waits and tries again."""

    def __init__(self, status: ReadStatus, message: str, hint: str) -> None:
        code = ExitCode.NO_DATA if status in (ReadStatus.MISSING, ReadStatus.DELETED) else ExitCode.USAGE
        super().__init__(message, hint, code, f"run_{status}")
        self.status = status


def locate(path: Path) -> Path:
    """The database of a run directory: in it, or where its pointer says."""
    database = path / rundir.DATABASE
    if database.exists():
        return database
    try:
        where = msgspec.json.decode((path / rundir.POINTER).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
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
        return local
    raise RunUnreadable(
        ReadStatus.ELSEWHERE,
        f"the database of {path} is on {where.get('host')} ({local}) until the run ends",
        f"`ssh {where.get('host')} distdiag tui {path.absolute()}`",
    )


def rows(con: sqlite3.Connection, sql: str, args: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
    """All rows of a SELECT. At the moment when the writer folds its log into the file, a reader is told that it would
    have to write: it asks again.

    Raises:
        sqlite3.Error: anything else, or this for longer than `FOLDING_S`.
    """
    end = time.monotonic() + FOLDING_S
    while True:
        try:
            return con.execute(sql, args).fetchall()
        except sqlite3.OperationalError as e:
            if "readonly" not in str(e) or time.monotonic() > end:
                raise
        time.sleep(0.02)


def connect(database: Path) -> tuple[sqlite3.Connection, str | None]:
    quoted = database.absolute().as_posix().replace("%", "%25").replace("?", "%3f").replace("#", "%23")

    def attempt(options: str) -> sqlite3.Connection:
        con = sqlite3.connect(
            f"file:{quoted}?{options}", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            rows(con, "SELECT count(*) FROM sqlite_master")
        except BaseException:
            con.close()
            raise
        return con

    try:
        return attempt("mode=ro"), None
    except sqlite3.OperationalError as e:
        # a WAL database needs its -shm file, which a read-only disk does not let us make
        wal = database.with_name(database.name + "-wal")
        if "locked" in str(e) or os.access(database.parent, os.W_OK) or not os.access(database, os.R_OK):
            raise
        note = "read without its newest rows: the directory is read-only" if size_of(wal) else None
        return attempt("mode=ro&immutable=1"), note


def unreadable(error: sqlite3.Error, path: Path, database: Path) -> RunUnreadable:
    text = str(error)
    if not database.exists():
        return RunUnreadable(
            ReadStatus.DELETED, f"{path} was deleted while it was open", "`distdiag tui RUN` opens another run"
        )
    if "locked" in text or "busy" in text:
        return RunUnreadable(
            ReadStatus.LOCKED,
            f"{database} is locked by another process",
            f"try again; `fuser {database}` names who holds it",
        )
    if "no such table" in text or "no such column" in text:
        if not size_of(database):
            return RunUnreadable(
                ReadStatus.MISSING, f"{database} is empty so far", "the monitor is just starting; try again"
            )
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
