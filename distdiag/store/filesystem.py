"""Find the file system of a path: SQLite's WAL needs shared memory, which network mounts lack."""

from __future__ import annotations

import os
from pathlib import Path

# https://www.sqlite.org/wal.html: "WAL does not work over a network filesystem".
NETWORK_TYPES = frozenset({
    "nfs", "nfs4", "lustre", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph", "glusterfs", "gpfs",
    "beegfs", "panfs", "wekafs", "pvfs2", "orangefs", "gfs2", "ocfs2", "9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs",
})  # fmt: skip
LOCAL_FUSE = frozenset({"fuse.overlayfs", "fuse.fuse-overlayfs", "fuse.ext4", "fuse.ntfs-3g", "fuse.portal"})


def _unescape(mount_point: str) -> str:
    return mount_point.encode().decode("unicode_escape") if "\\" in mount_point else mount_point


def filesystem_type(path: Path, mounts: str | None = None) -> str | None:
    """Return the file system type of `path`, as the kernel names it; None if that cannot be read.

    Args:
        path: Need not exist: its nearest existing parent decides.
        mounts: Contents of `/proc/mounts`, for tests.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(errors="replace")
        except OSError:
            return None
    real = os.path.realpath(path)
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = _unescape(fields[1])
        inside = point == "/" or real == point or real.startswith(point.rstrip("/") + "/")
        # later lines hide earlier ones on the same mount point, hence >=
        if inside and (best is None or len(point) >= best[0]):
            best = (len(point), fields[2])
    return best[1] if best else None


def is_network(fs_type: str | None) -> bool:
    """True if WAL is unsafe on this type; an unknown type counts as local, as for SQLite."""
    if fs_type is None:
        return False
    return fs_type in NETWORK_TYPES or (fs_type.startswith("fuse.") and fs_type not in LOCAL_FUSE)
