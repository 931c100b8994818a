"""The directories of rank pages: only our own are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distdiag.page import directories
from distdiag.page.layout import PAGE_BYTES, page_path
from distdiag.page.writer import PageWriter
from tests.jobs import REPOSITORY, clean_env

HOLD = "import sys; from pathlib import Path; from distdiag.page import directories; directories.hold(Path(sys.argv[1])); print(1, flush=True); input()"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's directory in its own memory file system."""
    monkeypatch.setattr(directories, "SHM", tmp_path)
    return directories.memory_root()


def abandoned(directory: Path) -> Path:
    """Make the week-old pages of a job that has ended."""
    directories.make(directory)
    PageWriter(page_path(directory, 0)).publish()
    for name in ("r0.trace", "r0.fatal", "r0.sock", "monitor.lock"):
        (directory / name).touch()
    return old(directory)


def old(path: Path) -> Path:
    os.utime(path, (1e9, 1e9), follow_symlinks=False)
    return path


def test_only_abandoned_page_directories_of_ours_are_removed(root: Path, tmp_path: Path) -> None:
    own = root / "own"
    directories.make(own)
    gone = abandoned(root / "gone")
    kept = {
        "checkpoints": root / "checkpoints",  # no page, no mark
        "foreign": root / "foreign",  # pages of an older version: no mark
        "visited": abandoned(root / "visited"),  # ours, but with another file in it
        "young": root / "young",
        "open": abandoned(root / "open"),  # others can enter it, so anyone may have written the mark
    }
    kept["checkpoints"].mkdir()
    (kept["checkpoints"] / "model.pt").write_text("weights")
    kept["foreign"].mkdir()
    PageWriter(page_path(kept["foreign"], 0)).publish()
    (kept["visited"] / "notes.txt").write_text("mine")
    directories.make(kept["young"])
    kept["open"].chmod(0o755)
    for name in ("checkpoints", "foreign", "visited", "open"):
        old(kept[name])
    elsewhere = abandoned(tmp_path / "elsewhere")
    (root / "link").symlink_to(elsewhere)
    old(root / "link")
    before = {name: sorted(os.listdir(d)) for name, d in kept.items()}
    assert directories.sweep(own) == [gone]
    assert {name: sorted(os.listdir(d)) for name, d in kept.items()} == before
    assert elsewhere.is_dir() and (elsewhere / "r0.trace").exists() and not gone.exists()


def test_locked_pages_are_kept_whatever_pid_is_in_them(root: Path, tmp_path: Path) -> None:
    """Another container that shares /dev/shm: its process numbers mean nothing here, its locks do."""
    own, other = root / "own", abandoned(root / "other")
    directories.make(own)
    env = clean_env(tmp_path / "home", {"PYTHONPATH": str(REPOSITORY)})
    command = [sys.executable, "-c", HOLD, str(other)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        assert directories.sweep(own) == [] and other.is_dir()
        holder.kill()
        holder.wait()
    assert directories.sweep(own) == [other]


def test_pages_of_a_killed_job_are_kept_for_a_day_if_there_is_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing into a mapped page changes no time of its file: a job of a week has a week-old directory."""
    own, killed = root / "own", root / "killed"
    for directory in (own, killed):
        directories.make(directory)
    page = PageWriter(page_path(killed, 0))
    page.header.heartbeat_ns = time.monotonic_ns()
    page.publish()
    old(killed)
    monkeypatch.setattr(directories, "_half_free", lambda _: True)
    monkeypatch.setattr(directories, "KEPT_S", 600.0)
    assert directories.sweep(own) == []
    page.header.heartbeat_ns -= 601 * 10**9
    assert directories.sweep(own) == [killed]


def test_pages_of_a_killed_job_make_room_for_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, killed = root / "own", abandoned(root / "killed")
    directories.make(own)
    monkeypatch.setattr(directories, "KEPT_S", 1e12)
    monkeypatch.setattr(directories, "_half_free", lambda _: True)
    assert directories.sweep(own) == []
    monkeypatch.setattr(directories, "_half_free", lambda _: False)
    assert directories.sweep(own) == [killed]


def test_pages_in_a_run_directory_sweep_nothing(tmp_path: Path) -> None:
    """A run directory named distdiag-…: older code mistook it for its own in /dev/shm."""
    run = tmp_path / "distdiag-runs"
    pages = run / "pages.0"
    directories.make(pages)
    (run / "checkpoints").mkdir()
    old(run / "checkpoints")
    assert directories.sweep(pages) == [] and (run / "checkpoints").is_dir()


def test_a_page_directory_is_private_whatever_the_umask(root: Path) -> None:
    before = os.umask(0)
    try:
        directories.make(root / "a")
    finally:
        os.umask(before)
    assert [d.stat().st_mode & 0o777 for d in (root, root / "a")] == [0o700, 0o700]


def test_a_link_or_another_users_directory_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    root.symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError):
        directories.make(root / "a")
    root.unlink()
    if os.getuid() == 0:
        root.mkdir()
        os.chown(root, 65534, 65534)
        with pytest.raises(PermissionError):
            directories.make(root / "a")


def test_room_is_checked_for_all_pages_of_the_node() -> None:
    free = os.statvfs("/dev/shm")
    fit = (free.f_bavail * free.f_frsize - directories.SPARE_BYTES) // PAGE_BYTES
    assert directories.has_room(directories.SHM, 1) == (fit >= 1)
    assert not directories.has_room(directories.SHM, fit + 100)
    assert not directories.has_room(Path("/does/not/exist"), 1)
