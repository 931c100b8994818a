"""Choose where a run's database is written: in the run directory, or on a local disk if that is a network mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

import msgspec
import psutil

from distdiag import files
from distdiag.store import rundir

# https://www.sqlite.org/wal.html: "WAL does not work over a network filesystem".
NETWORK_TYPES = frozenset({
    "nfs", "nfs4", "lustre", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph", "glusterfs", "gpfs",
    "beegfs", "panfs", "wekafs", "pvfs2", "orangefs", "gfs2", "ocfs2", "9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs",
})  # fmt: skip
LOCAL_FUSE = frozenset({"fuse.overlayfs", "fuse.fuse-overlayfs", "fuse.ext4", "fuse.ntfs-3g", "fuse.portal"})


def filesystem_type(path: Path) -> str | None:
    """Return the file system type of `path`, or of its nearest parent, as the kernel names it; None if that cannot be read."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return None
    real = Path(os.path.realpath(path))
    inside = [m for m in reversed(mounts) if real.is_relative_to(m.mountpoint)]  # a later one hides those before it
    return max(inside, key=lambda m: len(m.mountpoint)).fstype if inside else None


def is_network(fs_type: str | None) -> bool:
    """True if WAL is unsafe on this type; an unknown type counts as local, as for SQLite."""
    if fs_type is None:
        return False
    return fs_type in NETWORK_TYPES or (fs_type.startswith("fuse.") and fs_type not in LOCAL_FUSE)


RESERVE = f".{rundir.DATABASE}.reserve"
RESERVE_BYTES = 2**20  # disk space reserved for the last rows of the run


class Location:
    """The location of one run's database."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / rundir.DATABASE
        self.notice: tuple[str, str] | None = None  # (level, text) of an event about the location
        self.error: OSError | None = None  # why the local directory could not be created
        self._local: Path | None = None  # directory that holds the database instead of run_dir
        self._choose(filesystem_type(run_dir))

    def _choose(self, fs_type: str | None) -> None:
        if not is_network(fs_type):
            return
        base = Path(tempfile.gettempdir())
        if is_network(filesystem_type(base)):
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
