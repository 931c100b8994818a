"""The directories of the rank pages of a node, and when such a directory may be removed.

A store into a page must never wait for a disk. So the pages are in /dev/shm if it has room for those of all local ranks, else in the
run directory. Every directory of ours has a mark, a small file. Each rank and the monitor hold a shared lock on it: the kernel
releases it when they die, and it works across containers that share /dev/shm but not process numbers. Only a directory with our
mark that no process holds is removed, and only our files in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from pathlib import Path

from distdiag import files
from distdiag.page.layout import PAGE_BYTES

SHM = Path("/dev/shm")
MARK, MARK_TEXT = ".distdiag-pages", b"distdiag rank pages, version 1\n"
MONITOR_LOCK = "monitor.lock"  # held by the monitor, from its rank's decision to start it
RUN_MARK = f"{MARK}.run"  # device and inode of the run directory whose pages these are
RECORD_BYTES = 8192  # of a node record are read
SPARE_BYTES = 64 * 1024  # in addition to the pages: mark, sockets, stacks written by signal handlers
SWEEP_AGE_S = 60.0  # a younger directory may not be locked yet
KEPT_S = 86_400.0  # pages of a job that was killed with its monitor are kept for its autopsy, if there is room
_OURS = re.compile(r"rank_\d+\.(page|new\d+)|\.?(r\d+|nodes)\.[a-z]+(\.\d+)?|monitor\.lock")


def memory_root() -> Path:
    return SHM / f"distdiag-{os.getuid()}"


def fallback_root() -> Path:
    """Return the directory for runs if the working directory is read-only; others could have made it: see `own_fallback_root`."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"distdiag-{os.getuid()}" / "reports"


def own_fallback_root() -> Path | None:
    """Return `fallback_root` if it is this user's and no other user can write in it; else None."""
    root = fallback_root()
    try:
        found = [root.parent.lstat(), root.lstat()]
    except OSError:
        return None
    ours = all(stat.S_ISDIR(st.st_mode) and st.st_uid == os.geteuid() and not st.st_mode & 0o022 for st in found)
    return root if ours else None


def node_record(run_dir: Path, node: int) -> Path:
    """Return the file in the run directory that names this node's launcher and page directory."""
    return run_dir / f".node_{node}"


def ended_record(run_dir: Path, node: int) -> Path:
    """Return the file in which this node's monitor, when it closes, lists the ranks that have ended."""
    return run_dir / f".node_{node}.ended"


def overflow(run_dir: Path, node: int) -> Path:
    """Return the page directory for ranks whose page does not fit into the node's own."""
    return run_dir / f"pages.{node}"


def note_ended(run_dir: Path, node: int, ranks: list[int]) -> None:
    """Write the ended record; without it, only a relaunch cannot see which ranks have ended."""
    with contextlib.suppress(OSError):
        files.write(run_dir, ended_record(run_dir, node).name, (" ".join(map(str, ranks)) + "\n").encode())


def of_run(run_dir: Path) -> dict[int, list[Path]]:
    """Return the page directories of a run that exist on this host, by node; the chosen one is first.

    A record may come from an archive. So it counts only if it names the run's own overflow directory, or one in memory that
    names this run directory in turn.
    """
    out: dict[int, list[Path]] = {}
    for name in files.names(run_dir):
        number = name.removeprefix(".node_")
        if number == name or not (number.isascii() and number.isdigit()) or len(number) > 7:
            continue
        try:
            chosen = Path(files.text(run_dir, name, RECORD_BYTES).rstrip("\n").partition(" ")[2])
        except OSError:
            continue
        second = overflow(run_dir, int(number))
        found = [
            d for d in dict.fromkeys((chosen, second)) if _is_directory(d) and (d == second or _belongs(d, run_dir))
        ]
        if found:
            out[int(number)] = found
    return out


def abandoned(run_dir: Path) -> list[Path] | None:
    """Return the page directories of a run that was not closed, on this host; None if a process uses one."""
    left = []
    for node, found in of_run(run_dir).items():
        if ended_record(run_dir, node).exists():
            continue
        for pages in filter(is_marked, found):
            held = hold(pages, fcntl.LOCK_EX)
            if held is None:
                return None  # a rank or a monitor lives, perhaps in another container
            os.close(held)
            left.append(pages)
    return left


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (OSError, ValueError):  # of another user, or a name that no file can have
        return False


def _belongs(pages: Path, run_dir: Path) -> bool:
    try:
        return files.text(pages, RUN_MARK, 100) == _identity(run_dir)
    except (OSError, ValueError):
        return False


def _identity(run_dir: Path) -> str:
    found = run_dir.stat()
    return f"{found.st_dev}:{found.st_ino}\n"


def in_memory(pages: Path) -> bool:
    """True if these pages lie in this user's directory in memory, where no archive is unpacked."""
    return pages.parent == memory_root()


def private_directory(path: Path) -> None:
    """Create a directory that only this user can enter, whatever the umask; an existing one must be like that.

    Raises:
        PermissionError: it belongs to another user, is a symlink, or is no directory.
        OSError: it cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is not a directory of this user")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)


def make(directory: Path, run_dir: Path | None = None) -> None:
    """Create a page directory with its mark, unless it exists, and note there whose pages these are: readers check it.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    if directory.parent == memory_root():
        private_directory(directory.parent)
    else:
        directory.parent.mkdir(parents=True, exist_ok=True)
    private_directory(directory)
    if not is_marked(directory):
        files.write(directory, MARK, MARK_TEXT)
    if run_dir is not None and not _belongs(directory, run_dir):
        files.write(directory, RUN_MARK, _identity(run_dir).encode())


def has_room(directory: Path, pages: int) -> bool:
    try:
        s = os.statvfs(directory)
    except OSError:
        return False
    return s.f_bavail * s.f_frsize >= pages * PAGE_BYTES + SPARE_BYTES and (s.f_favail > 4 * pages or not s.f_files)


def hold(directory: Path, lock: int = fcntl.LOCK_SH) -> int | None:
    """Mark a page directory as used for as long as the returned file descriptor is open; None if it cannot be locked."""
    try:
        fd = os.open(directory / MARK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, lock | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def monitor_runs(pages: Path) -> bool:
    try:
        lock = files.open_to_read(pages, MONITOR_LOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def remove(directory: Path) -> bool:
    """Remove a page directory of ours that no process holds; True if it no longer exists.

    Only files that a rank or a monitor creates are removed: a directory with any other file stays.
    """
    fd = hold(directory, fcntl.LOCK_EX) if is_marked(directory) else None
    if fd is None:
        return False
    try:
        names = os.listdir(directory)
        if not all(_OURS.fullmatch(n) or n.startswith(MARK) for n in names):
            return False
        # the mark last: after a failure, a later call can remove the rest
        for name in sorted(names, key=lambda n: n == MARK):
            os.unlink(directory / name)
        directory.rmdir()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def sweep(directory: Path) -> list[Path]:
    """Remove the page directories in memory that earlier jobs of this user left, if this job's is in memory, too.

    They are kept for a day after the last sign of life in them, while half of the file system is free.
    """
    root = memory_root()
    if directory.parent != root:
        return []
    try:
        own = root.lstat()
        if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.getuid():
            return []
        others = [Path(e.path) for e in os.scandir(root) if e.name != directory.name]
    except OSError:
        return []
    after_s = KEPT_S if _half_free(root) else SWEEP_AGE_S
    return [other for other in others if _unused_s(other) > after_s and remove(other)]


def _half_free(root: Path) -> bool:
    try:
        found = os.statvfs(root)
    except OSError:
        return False
    return 2 * found.f_bavail > found.f_blocks


def _unused_s(directory: Path) -> float:
    """Return the time since the last sign of life: a rank's heartbeat, as writing into a page changes no time of its file."""
    from distdiag.page.reader import header_of

    try:
        unused_s = time.time() - directory.lstat().st_mtime
        paths = sorted(directory.glob("*.page"))
    except OSError:
        return 0.0
    for header in filter(None, map(header_of, paths)):
        if header.heartbeat_ns > 0:
            unused_s = min(unused_s, max(0.0, (time.monotonic_ns() - header.heartbeat_ns) / 1e9))
    return unused_s


def is_marked(directory: Path) -> bool:
    """True for a real directory of this user, closed to others, that has our mark."""
    try:
        d, m = directory.lstat(), (directory / MARK).lstat()
        return (
            stat.S_ISDIR(d.st_mode)
            and d.st_uid == os.getuid() == m.st_uid
            and not d.st_mode & 0o077
            and stat.S_ISREG(m.st_mode)
            and m.st_size == len(MARK_TEXT)
            and files.read(directory, MARK) == MARK_TEXT
        )
    except OSError:
        return False
