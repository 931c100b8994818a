"""The files of a run directory: each is opened relative to its directory's descriptor, follows no link, and is replaced whole.

A run directory may come from an archive, or another user may have prepared it. So only the directory itself may be reached through links.
Below it every component is opened with O_NOFOLLOW. A writer needs a directory of this user; new files are created exclusively, and
an existing one must be a regular file of this user with one name. Files can be read by whoever may read the run directory, which
distdiag creates for its owner only, unless --share opens it to others.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pwd
import stat
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from distdiag.errors import DistdiagError

MOST_WALKED = 1 << 17  # files and directories below one that a person has named
MOST_BYTES = 64 << 20  # that a reader takes from one file
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotAFile(OSError, ValueError):
    """It is a FIFO, a device or a directory."""


@contextlib.contextmanager
def entered(folder: Path, below: str = "", make: bool = False, own: bool = False) -> Iterator[int]:
    """Yield a descriptor of `folder/below`; links are followed up to `folder`, not below it.

    Args:
        folder: The run directory.
        below: Names of directories in it, joined by "/".
        make: Create those of `below` that are missing.
        own: Refuse a directory of another user.

    Raises:
        OSError: it cannot be entered, a component is a link, or it belongs to another user.
    """
    fd = os.open(folder, _DIRECTORY)
    try:
        for name in filter(None, below.split("/")):
            if name == "..":
                raise PermissionError(errno.EPERM, f"{below} leaves the directory")
            above, fd = fd, -1
            try:
                fd = _below(above, name, make, own, folder)
            finally:
                os.close(above)
        if own:
            check_owner(fd, folder / below)
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _below(above: int, name: str, make: bool, own: bool, folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    if not make:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / name))
    if own:
        check_owner(above, folder)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700 | os.fstat(above).st_mode & 0o055, dir_fd=above)
    return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)


def check_owner(fd: int, path: Path) -> None:
    """Check that an open directory belongs to this user, or to root.

    Raises:
        PermissionError: it belongs to another user.
    """
    found = os.fstat(fd)
    if found.st_uid in (os.geteuid(), 0) or _maps_us_to(found.st_uid, found.st_dev, f"/proc/self/fd/{fd}"):
        return
    raise PermissionError(errno.EPERM, f"{path} belongs to {user_name(found.st_uid)}")


@lru_cache(maxsize=64)
def _maps_us_to(uid: int, _device: int, directory: str) -> bool:
    """True if a file that we create in `directory` belongs to `uid`: NFS makes root "nobody". Leaves nothing behind."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            return False
        probe = f"{directory}/.distdiag.{os.getpid()}"
        try:
            fd = os.open(probe, _EXCLUSIVE, 0o600)
            os.unlink(probe)
        except OSError:
            return False
    try:
        return os.fstat(fd).st_uid == uid
    finally:
        os.close(fd)


def walk(directory: Path, depth: int | None = None) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` does; with `depth`, of so many directories below, and of a large one the first files only.

    Raises:
        DistdiagError: it has more files than a job leaves: a person has named `/`, or a whole disk.
    """
    left, top = MOST_WALKED, len(directory.parts)
    for folder, below, names in os.walk(directory):
        left -= 1 + len(names)
        if left < 0 and depth is not None:
            return
        if left < 0:
            what = f"{directory} has more than {MOST_WALKED:,} files and directories"
            raise DistdiagError(what, "name the directory of the job's run, dumps or logs", kind="too_large")
        if depth is not None and len(Path(folder).parts) - top >= depth:
            below.clear()
        yield folder, below, names


def user_name(uid: int) -> str:
    """Return a user as people know them: "user ann (uid 1004)"."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def owner_of_other(path: Path) -> str | None:
    """Return whose directory this is, if it is another user's; None if it is ours, or missing."""
    try:
        uid = path.stat().st_uid
    except OSError:
        return None
    return None if uid == os.geteuid() else user_name(uid)


def make_run_directory(path: Path, share: bool = False, exist_ok: bool = True) -> None:
    """Create a run directory, for its owner or (`share`) for all whom the umask admits; parents as mkdir makes them.

    Raises:
        FileExistsError: it exists, and `exist_ok` is not set.
        OSError: it cannot be created, or an existing one belongs to another user.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(0o755 if share else 0o700)
    except FileExistsError:
        if not exist_ok:
            raise
    with entered(path, own=True):
        pass


def run_names(name: str, began_s: float) -> Iterator[str]:
    """Yield names for the directory of a run: `<time>-<name>`, then `<time>-<name>-2`, …

    Args:
        name: Name of the job; everything but letters, digits, `._-` becomes `-`.
        began_s: When the job was launched, Unix seconds.
    """
    clean = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)[:60].strip("-.") or "run"
    stem = time.strftime("%Y%m%d-%H%M%S", time.localtime(began_s)) + f"-{clean}"
    yield stem
    for n in itertools.count(2):
        yield f"{stem}-{n}"


def open_to_read(folder: Path, name: str) -> int:
    """Return a descriptor of a regular file of a run; a FIFO does not block.

    Raises:
        OSError: it cannot be read, is a link, or is no regular file.
    """
    below, _, last = name.rpartition("/")
    with entered(folder, below) as directory:
        return _open_in(directory, last)


def _open_in(directory: int, name: str) -> int:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    return _regular(fd, name)


def read_in(directory: int, name: str) -> bytes:
    """Return the content of a file in an open directory (`entered`); see `read`."""
    with open(_open_in(directory, name), "rb", buffering=0) as file:
        return file.read(MOST_BYTES)


def _regular(fd: int, name: str) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFile(errno.EINVAL, f"{name} is not a regular file")
    return fd


def read(folder: Path, name: str, most: int = MOST_BYTES, own: bool = False) -> bytes:
    """Return a file's content, at most its first `most` bytes.

    Args:
        own: Refuse a file of another user: its content decides something.

    Raises:
        OSError: it cannot be read, is a link, is no regular file, or belongs to another user.
    """
    with open(open_to_read(folder, name), "rb") as file:
        uid = os.fstat(file.fileno()).st_uid
        if own and uid not in (os.geteuid(), folder.stat().st_uid):
            raise PermissionError(errno.EPERM, f"{folder / name} belongs to {user_name(uid)}")
        return file.read(most)


def text(folder: Path, name: str, most: int = MOST_BYTES, own: bool = False) -> str:
    """Return a file's content as text; see `read`."""
    return read(folder, name, most, own).decode("utf-8", "replace")


def is_file(folder: Path, name: str) -> bool:
    """True if this is a regular file of the run, not a link."""
    try:
        below, _, last = name.rpartition("/")
        with entered(folder, below) as directory:
            return stat.S_ISREG(os.stat(last, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def names(folder: Path, below: str = "") -> list[str]:
    """Return the sorted names in a directory of a run; empty if it cannot be listed."""
    try:
        with entered(folder, below) as directory:
            return sorted(os.listdir(directory))
    except OSError:
        return []


def open_own(folder: Path, name: str, flags: int) -> int:
    """Return a descriptor of a file that we write in place; it is created if missing.

    Args:
        flags: In addition to O_CREAT, O_NOFOLLOW and O_CLOEXEC.

    Raises:
        OSError: it cannot be opened, or is a link, another user's, or known under a second name.
    """
    below, _, last = name.rpartition("/")
    with entered(folder, below, make=True, own=True) as directory:
        mode = _mode(directory)
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = _regular(os.open(last, flags | os.O_CREAT, mode, dir_fd=directory), name)
        found, above = os.fstat(fd), os.fstat(directory)
    if found.st_uid not in (os.geteuid(), above.st_uid) or found.st_nlink != 1:
        os.close(fd)
        raise PermissionError(errno.EPERM, f"{folder / name} is not a file of this user with one name")
    return fd


def _mode(directory: int) -> int:
    return 0o600 | os.fstat(directory).st_mode & 0o044


@contextlib.contextmanager
def replacing(folder: Path, name: str, own: bool = True, over: bool = True) -> Iterator[Path]:
    """Yield a new hidden file, which becomes `folder/name` when the block ends; if the block raises, it is removed.

    Args:
        own: Refuse a directory of another user; False for files that belong to no run.
        over: Replace a file of that name.

    Raises:
        FileExistsError: there is one, and `over` is not set.
        OSError: it could not be created or renamed, or the directory belongs to another user.
    """
    below, _, last = name.rpartition("/")
    with entered(folder, below, make=True, own=own) as directory:
        part = f".{last.lstrip('.')}.{os.getpid()}"
        os.close(_new(directory, part))
        try:
            yield folder / below / part
            if not over:
                os.close(os.open(last, _EXCLUSIVE, dir_fd=directory))
            os.replace(part, last, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=directory)
            raise


def _new(directory: int, part: str) -> int:
    """Return a descriptor of a new file, in place of one that a killed process with our number has left."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part, dir_fd=directory)
    return os.open(part, _EXCLUSIVE, _mode(directory), dir_fd=directory)


def write(folder: Path, name: str, data: bytes) -> Path:
    """Write a file of a run as a whole and return its path; directories of `name` are created.

    Raises:
        OSError: it cannot be written, or the directory belongs to another user.
    """
    with replacing(folder, name) as part:
        part.write_bytes(data)
    return folder / name


def relink(folder: Path, name: str, target: str) -> None:
    """Make `folder/name` a link to `target`, in place of an older link or file.

    Raises:
        OSError: the directory cannot be written, or has no links.
    """
    part = f".{name}.{os.getpid()}"
    with entered(folder) as directory:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=directory)
        os.symlink(target, part, dir_fd=directory)
        os.replace(part, name, src_dir_fd=directory, dst_dir_fd=directory)


def remove(folder: Path, name: str) -> None:
    """Remove a file of a run, if it exists.

    Raises:
        OSError: it cannot be removed, or the directory belongs to another user.
    """
    below, _, last = name.rpartition("/")
    with contextlib.suppress(FileNotFoundError), entered(folder, below, own=True) as directory:
        os.unlink(last, dir_fd=directory)


def create(folder: Path, name: str, data: bytes) -> None:
    """Create a file with this content at once, unless a file of this name exists: one of several processes succeeds.

    Raises:
        OSError: the directory cannot be written, or belongs to another user.
    """
    below, _, last = name.rpartition("/")
    with entered(folder, below, make=True, own=True) as directory:
        part = f".{last[:120]}.{os.uname().nodename[:64]}.{os.getpid()}"
        with open(_new(directory, part), "wb") as file:
            file.write(data)
        try:
            os.link(part, last, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            pass
        except OSError:  # no hard links here
            with (
                contextlib.suppress(FileExistsError),
                open(os.open(last, _EXCLUSIVE, _mode(directory), dir_fd=directory), "wb") as file,
            ):
                file.write(data)
        finally:
            os.unlink(part, dir_fd=directory)
