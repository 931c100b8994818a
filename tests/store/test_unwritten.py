"""A run directory without rows: the reader reports what is true of its job, and names what else lies there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag import procfs
from distdiag.cli import main
from distdiag.page import directories
from distdiag.page.layout import page_path
from distdiag.recorder.run_claim import launcher_id
from tests.monitor.test_damaged_pages import a_page

HOST = socket.gethostname()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory as ranks of this host claim it, with the page of a living rank in it."""
    pages = directories.overflow(tmp_path, 0)
    directories.make(pages)
    directories.node_record(tmp_path, 0).write_text(f"{launcher_id()} {pages}\n")
    return tmp_path


def shown(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["diagnose", str(run)]) == 4
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("distdiag: error: ") and hint.startswith("hint: ")
    return f"{error}\n{hint}"


def test_a_job_that_starts_is_waited_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for database in (False, True):
        if database:
            (run / "run.db").touch()
        assert "the monitor is just starting" in shown(run, capsys)  # its launcher lives, no rank has a page yet


def test_a_run_whose_pages_the_monitor_has_removed_is_not_starting(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk too full for a single row; the launcher of the job still lives."""
    (run / "run.db").touch()
    (run / "monitor.log").touch()
    assert "the monitor is just starting" in shown(run, capsys)
    shutil.rmtree(directories.overflow(run, 0))
    text = shown(run, capsys)
    assert "starting" not in text and "the job has ended" in text


def test_a_mapped_page_shows_a_job_that_starts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories.node_record(run, 0).write_text(f"{HOST}:1:1 {run / 'pages.0'}\n")
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.monitor.test_damaged_pages import a_page\n"
        "page = a_page(Path(sys.argv[1]), 0)\nprint('ready', flush=True)\nsys.stdin.read()\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", code, str(run / "pages.0")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        from distdiag.store import unwritten  # `diagnose` would start a monitor

        assert "the monitor is just starting" in unwritten.explain(run, "R")[1]
        rank.kill()
        rank.communicate()
        text, _ = unwritten.explain(run, "R")
        assert "the job has ended" in text
    finally:
        rank.kill()
        rank.communicate()


def test_an_unpacked_run_without_its_database_is_not_starting(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its pages name a process that lives here and maps none of them."""
    for rank in (0, 1):
        page = a_page(run / "pages.0", rank)
        page.header.step, page.header.pid = 7 + rank, os.getppid()
        page.header.process_start_ticks = procfs.start_ticks(os.getppid()) or 0
        page.make_private()
    text = shown(run, capsys)
    assert "starting" not in text
    assert "no process uses its pages: the job has ended, or this is a copy" in text
    assert "copy run.db" in text
    (run / "verdict.txt").write_text("distdiag: deadlock\n")
    assert str(run / "verdict.txt") in shown(run, capsys)
    (run / "flight_recorder").mkdir()
    (run / "flight_recorder" / "rank_0.json").write_text("{}")
    assert f"`distdiag diagnose {run / 'flight_recorder'}`" in shown(run, capsys)


def test_a_run_of_another_host_is_not_starting_here(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "pages.0")
    directories.node_record(run, 0).write_text("node17:4:5 /dev/shm/distdiag-0/x\n")
    text = shown(run, capsys)
    assert "its job was started on node17" in text and "starting" not in text


def test_an_old_directory_that_no_rank_claimed_is_not_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert "the job is starting" in shown(tmp_path, capsys)
    os.utime(tmp_path, (1e9, 1e9))
    text = shown(tmp_path, capsys)
    assert "no rank has claimed it" in text and "starting" not in text


def test_a_monitor_that_failed_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories.node_record(run, 0).write_text(f"{HOST}:1:1 {run / 'pages.0'}\n")
    (run / "monitor.log").write_text("Traceback (most recent call last):\nPermissionError: [Errno 1] \x1b[2J\n")
    text = shown(run, capsys)
    assert "its monitor could not write (PermissionError: [Errno 1] \\x1b[2J)" in text


@pytest.mark.parametrize(
    "record", ["", " ", ":", "h", f"{HOST}", f"{HOST}:", f"{HOST}:x:y /", f"{HOST}:{'9' * 5000}:1 /", "\x1b[2J\n"]
)
def test_a_forged_record_is_no_traceback(run: Path, record: str, capsys: pytest.CaptureFixture[str]) -> None:
    directories.node_record(run, 0).write_text(record)
    (run / "pages.0" / "rank_0.page").write_bytes(b"\xff" * (1 << 20))
    os.mkfifo(page_path(run / "pages.0", 1))
    assert "\x1b" not in shown(run, capsys)
