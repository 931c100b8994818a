"""A reader changes and signals what SECURITY.md's table allows, also in a run directory that somebody has prepared."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from distdiag import procfs
from distdiag.assistant import answers
from distdiag.cli import COMMANDS, main
from distdiag.errors import DistdiagError
from distdiag.monitor.loop import Monitor
from distdiag.page import directories
from distdiag.page.layout import page_path
from distdiag.recorder.start_monitor import take_over
from tests import watch
from tests.jobs import REPOSITORY, TEST_MARK, closed, marked, unwrapped
from tests.monitor.test_damaged_pages import a_page
from tests.monitor.test_killed_monitor import two_ranks
from tests.report.runs import make_run
from tests.watch import differing, tree

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

WRITTEN = (
    ".run.db.reserve", ".verdict.stream", "verdict.txt", "monitor.log", "run.db.where", ".node_0.ended", "run.db-wal", "run.db-shm",
)  # fmt: skip


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[str]]:
    with watch.bystander() as process:
        yield process


def prepared(root: Path, pid: int) -> Path:
    """Make a run as an archive may bring it: links to files outside, and a page that names a process of ours."""
    outside = root / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "notes.txt").write_text("mine\n")
    run = make_run(root / "run", ranks=2, steps=20)
    (run / "run.json").unlink(missing_ok=True)
    for name in WRITTEN:
        (run / name).symlink_to(outside / "notes.txt")
    for name in ("stacks", "flight_recorder", "profile", "nodes", "attempt_1"):
        (run / name).symlink_to(outside / "folder")
    pages = directories.overflow(run, 0)
    directories.make(pages)
    directories.node_record(run, 0).write_text(f"h:1:1 {pages}\n")
    page = a_page(pages, 0)
    page.header.pid, page.header.process_start_ticks = pid, procfs.start_ticks(pid) or 0
    page.header.trace_signal, page.header.heartbeat_ns = 15, 1  # silent: it would get the signal
    page.path.chmod(0o600)
    (pages / "r0.trace").touch()
    page.make_private()  # nobody maps it
    return run


def allowed() -> dict[str, tuple[list[str], str]]:
    """Return by command what SECURITY.md allows: (paths below RUN, whom it signals)."""
    text = (REPOSITORY / "SECURITY.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    return {name: (re.findall(r"`RUN/([\w.]+)`", changes), signals) for name, changes, signals in rows}


def test_the_table_names_every_command() -> None:
    assert allowed().keys() == COMMANDS.keys()


READERS = (
    ["diagnose"], ["diagnose", "--json"], ["diagnose", "--why", "straggler"], ["tui", "--once"], ["tui", "--once", "--json"],
    ["dump", "--timeout", "0.2"], ["dump", "--no-save"], ["profile", "--timeout", "1"], ["report"], ["report", "--force"],
    ["report", "--format", "perfetto"], ["report", "--format", "text"], ["report", "--format", "json"], ["compare"],
)  # fmt: skip


def test_readers_of_a_prepared_run_change_and_signal_nothing_outside_it(
    tmp_path: Path, bystander: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "tree"
    run = prepared(root, bystander.pid)
    monkeypatch.chdir(tmp_path)
    for command, *options in READERS:
        before, began = tree(root), time.monotonic()
        main([command, str(run), *([str(run)] if command == "compare" else []), *options])
        assert time.monotonic() - began < 30, command  # no wait for a monitor that cannot be started: it took 42 s
        shown = capfd.readouterr().err
        assert "Traceback" not in shown, shown
        paths, signals = allowed()[command]
        saved = [str(run), *(str(run / p) for p in paths)] if paths else []
        changed = differing(before, tree(root))
        assert {c for c in changed if not any(c == p or c.startswith(f"{p}/") for p in saved[1:])} <= set(saved[:1]), (
            command
        )
        assert "nobody" in signals or command == "dump"
    assert marked(os.environ[TEST_MARK]).keys() <= {bystander.pid}  # no monitor
    assert bystander.stdin is not None
    received, _ = bystander.communicate("")
    assert received == ""  # no signal


def test_the_tools_of_an_assistant_change_and_signal_nothing(tmp_path: Path, bystander: subprocess.Popen[str]) -> None:
    run = prepared(tmp_path / "tree", bystander.pid)
    before = tree(tmp_path)
    tools = answers.Answers(str(run))
    ask = partial(tools.sql, "SELECT count(*) FROM meta")
    for tool in (tools.diagnose, tools.findings, tools.stacks, tools.steps, ask):
        with contextlib.suppress(DistdiagError):
            tool()
    assert differing(before, tree(tmp_path)) == set()
    assert bystander.communicate("")[0] == ""  # no signal


def test_a_run_that_was_killed_is_read_without_a_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its database has a log that was never merged, and no process has it open."""
    run = make_run(tmp_path / "run", ranks=2, steps=20)
    code = (
        "import os, sqlite3, sys\ncon = sqlite3.connect(sys.argv[1])\ncon.execute('PRAGMA journal_mode = WAL')\n"
        "con.execute(\"UPDATE meta SET value = 'from the log' WHERE key = 'command'\")\ncon.commit()\nos._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run / "run.db")], check=True, timeout=60)
    for path in run.iterdir():
        os.utime(path, (1e9, 1e9))
    before = tree(run)
    assert main(["diagnose", str(run)]) == 0
    assert main(["tui", "--once", "--json", str(run)]) == 0
    assert "from the log" in unwrapped(capfd.readouterr().out)
    assert differing(before, tree(run)) == set()


def test_a_monitor_of_a_prepared_directory_writes_through_no_link(tmp_path: Path) -> None:
    """What it writes replaces the links, and what it cannot write safely it leaves."""
    run = prepared(tmp_path, os.getpid())
    before = tree(tmp_path / "outside")
    monitor = Monitor(run, directories.overflow(run, 0), node=0, quiet=True, keep_bytes=1 << 30)
    monitor._survive(monitor.tick)
    monitor.gatherer.keep(monitor.snapshot(0.0))
    monitor.nodes.publish(monitor.snapshot(0.0), time.time(), closed=True)
    monitor.close()
    assert differing(before, tree(tmp_path / "outside")) == set()


def test_a_monitor_is_started_for_living_ranks_of_this_very_run_only(tmp_path: Path) -> None:
    run = prepared(tmp_path, os.getpid())
    directories.ended_record(run, 0).unlink()  # it alone would keep a monitor away
    assert take_over(run) == ([], False)  # nobody maps the page
    with two_ranks(tmp_path) as jobs:
        theirs = directories.of_run(tmp_path / "R")[0][0]
        directories.node_record(run, 0).write_text(f"h:1:1 {theirs}\n")  # a run that names the pages of another
        assert theirs not in directories.of_run(run).get(0, [])
        assert take_over(run) == ([], False)
        pages, started = take_over(tmp_path / "R")
        assert pages == [theirs] and not started  # its own monitor runs
        (tmp_path / "end").touch()
        assert [job.wait() for job in jobs] == [0, 0]
        closed(tmp_path / "R")


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000, "\0"])
def test_a_record_with_an_impossible_directory_is_passed_over(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", ranks=2, steps=20)
    directories.node_record(run, 0).write_text(f"h:1:1 /{name}\n")
    assert directories.of_run(run) == {} and main(["diagnose", str(run)]) == 0


def test_files_of_a_run_are_the_owners_alone_unless_it_is_shared(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for share, modes in (("", (0o700, 0o600)), ("1", (0o755, 0o644))):
            run = tmp_path / f"run{share}"
            code = f"from distdiag.recorder import run_claim; run_claim.claim({str(run)!r}, 'job')"
            env = {**os.environ, "DISTDIAG_SHARE": share, "PYTHONPATH": str(REPOSITORY)}
            subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
            make_run(run, ranks=2, steps=5)
            found = {p.lstat().st_mode & 0o777 for p in run.rglob("*") if p.is_file()}
            assert (run.stat().st_mode & 0o777, found) == (modes[0], {modes[1]})
            pages = directories.overflow(run, 0)
            directories.make(pages)
            assert pages.stat().st_mode & 0o777 == 0o700
            a_page(pages, 0)
            assert page_path(pages, 0).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
