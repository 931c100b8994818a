"""Choose where a run's database is written: in the run directory, or on a local disk if that is a network mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

import msgspec

from distdiag import files
from distdiag.store import filesystem, rundir

RESERVE = f".{rundir.DATABASE}.reserve"
RESERVE_BYTES = 2**20  # disk space reserved for the last rows of the run


class Location:
    """The location of one run's database.

    Attributes:
        path: Path of the database.
        notice: (level, text) of an event about the location; None if there is none.
        error: Why the local directory could not be created; None if it was, or is not needed.
    """

    def __init__(self, run_dir: Path, fs_type: str | None, local_dir: Path | None) -> None:
        self.run_dir = run_dir
        self.path = run_dir / rundir.DATABASE
        self.notice: tuple[str, str] | None = None
        self.error: OSError | None = None
        self._local: Path | None = None  # directory that holds the database instead of run_dir
        self._choose(fs_type or filesystem.filesystem_type(run_dir), local_dir)

    def _choose(self, fs_type: str | None, local_dir: Path | None) -> None:
        if not filesystem.is_network(fs_type):
            return
        base = local_dir or Path(tempfile.gettempdir())
        if local_dir is None and filesystem.is_network(filesystem.filesystem_type(base)):
            self.notice = "warning", f"run.db is on {fs_type}, where SQLite's WAL is unsafe; no local disk"
            return
        try:
            # the directory of a killed writer of this run, else a new one
            self._local = self._left_by_another() or Path(tempfile.mkdtemp(prefix="distdiag-", dir=base))
            self.path = self._local / rundir.DATABASE
            where = {"host": socket.gethostname(), "path": str(self.path)}
            files.write(self.run_dir, rundir.POINTER, msgspec.json.encode(where))
        except OSError as e:
            self.error = e
            return
        text = f"{self.run_dir} is on {fs_type}, where SQLite's WAL is unsafe: run.db is kept in {self._local} on "
        self.notice = "info", text + f"{where['host']} and copied back when the run ends"

    def _left_by_another(self) -> Path | None:
        """Return the local directory in which a killed writer of this run has left the database; None if there is none."""
        try:
            where = msgspec.json.decode(files.read(self.run_dir, rundir.POINTER, own=True), type=dict[str, str])
        except (OSError, msgspec.DecodeError, ValueError, RecursionError):
            return None
        path = Path(where.get("path", ""))
        here = where.get("host") == socket.gethostname() and path.name == rundir.DATABASE
        mine = here and path.is_file() and path.parent.lstat().st_uid == os.getuid()
        return path.parent if mine and path.parent.name.startswith("distdiag-") else None

    def hold_reserve(self) -> None:
        """Reserve disk space until `release_reserve`, so that a run can be closed on a full disk."""
        try:
            files.write(self.path.parent, RESERVE, bytes(RESERVE_BYTES))
        except OSError:
            self.release_reserve()

    def release_reserve(self) -> None:
        with contextlib.suppress(OSError):
            files.remove(self.path.parent, RESERVE)

    def bring_home(self) -> None:
        """Copy the closed database into the run directory, if it is elsewhere.

        Raises:
            OSError: it could not be copied; readers on this host still find it by the pointer.
        """
        if self._local is None:
            return
        with files.replacing(self.run_dir, rundir.DATABASE) as part:
            shutil.copyfile(self.path, part)
        files.remove(self.run_dir, rundir.POINTER)
        shutil.rmtree(self._local, ignore_errors=True)
        self.path = self.run_dir / rundir.DATABASE
