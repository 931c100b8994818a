"""Another user of the machine can neither read pages, nor forge findings, nor redirect a file; and is told what may not be read."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from distdiag.cli import main
from distdiag.errors import DistdiagError
from distdiag.monitor.evidence import dump
from distdiag.page import directories
from distdiag.page.layout import page_path
from distdiag.recorder import run_claim
from distdiag.recorder.start_monitor import take_over
from distdiag.store import rundir
from tests.monitor.test_damaged_pages import a_page
from tests.report.runs import STRAGGLER, make_run

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

OTHER = 54_321
COMMANDS = (
    ["diagnose"], ["diagnose", "--json"], ["dump", "--timeout", "0.5"], ["tui", "--once"], ["profile", "--timeout", "1"],
    ["report", "--format", "text", "-o", "-"],
)  # fmt: skip


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="distdiag-users-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_other(action: Callable[[], object]) -> str:
    """Return what `action` prints in a child process of another user, and its traceback if it raises."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            for number in (1, 2):
                os.dup2(writing, number)
            sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
            sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), encoding="utf-8")
            try:
                action()
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as output:
        text = output.read()
    os.waitpid(pid, 0)
    return text


def owned_by_other(path: Path) -> Path:
    for found in (path, *path.rglob("*")):
        os.chown(found, OTHER, OTHER, follow_symlinks=False)
    return path


def live_run(run: Path, in_memory: bool = False) -> Path:
    """Make a run with the pages of this process, as while the job runs."""
    make_run(run, ranks=2, steps=5)
    pages = directories.memory_root() / f"test-{os.getpid()}" if in_memory else directories.overflow(run, 0)
    directories.make(pages, run)
    directories.node_record(run, 0).write_text(f"h:1:1 {pages}\n")
    a_page(pages, 0)
    return run


def imported(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Run each command once: another user cannot read our sources to import them."""
    for command, *options in COMMANDS:
        main([command, str(run), *options])
    capfd.readouterr()


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_another_users_run_is_read_as_far_as_it_may_be(
    place: Path, mode: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    imported(make_run(place / "for_imports", ranks=2, steps=5), capfd)
    run = live_run(place / "run", in_memory=mode == 0o755)
    pages = directories.of_run(run)[0][0]
    run.chmod(mode)
    for path in run.iterdir():
        if path.is_file():
            path.chmod(0o600 if mode == 0o700 else 0o644)
    for command, *options in COMMANDS:
        shown = as_other(partial(main, [command, str(run), *options]))
        assert "Traceback" not in shown, shown
        if mode == 0o700 or command in ("dump", "profile"):
            assert "root (uid 0)" in shown and "hint" in shown, (command, shown)
        else:
            assert "train.py" in shown or "step 5" in shown or "2 of 2 ranks" in shown or '"ended"' in shown, (
                command,
                shown,
            )
    shown = as_other(lambda: page_path(pages, 0).read_bytes())
    assert "PermissionError" in shown
    directories.remove(pages)


def test_an_admin_asks_no_rank_of_another_user_and_writes_nothing_there(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = owned_by_other(live_run(place / "run"))
    before = sorted(str(p) for p in run.rglob("*"))
    assert take_over(run) == ([], False)
    with pytest.raises(DistdiagError, match=f"belong to uid {OTHER}"):
        dump.take(run, 0.2)
    assert main(["diagnose", str(run)]) == 0
    assert main(["report", str(run), "--format", "perfetto"]) == 2  # into the run directory
    assert f"belongs to uid {OTHER}" in capfd.readouterr().err
    assert sorted(str(p) for p in run.rglob("*")) == before


def test_findings_of_another_users_fallback_directory_are_not_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ./reports every command reads the one in the temporary directory, where anybody may have made it."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.delenv("DISTDIAG_RUN_DIR", raising=False)
    root = directories.fallback_root()
    make_run(root / "latest", ranks=2, steps=5, findings=(STRAGGLER,))
    root.parent.chmod(0o700)
    assert rundir.resolve() == root / "latest"
    owned_by_other(root.parent)
    with pytest.raises(DistdiagError, match="no run here"):
        rundir.resolve()
    os.chown(root.parent, 0, 0)
    with pytest.raises(DistdiagError, match="no run here"):
        rundir.resolve()


def test_a_run_directory_of_another_user_is_not_used(place: Path) -> None:
    run = place / "run"
    run.mkdir()
    (run / "run.db").symlink_to(place / "mine.db")
    run.chmod(0o777)
    owned_by_other(run)
    with pytest.raises(PermissionError, match=f"belongs to uid {OTHER}"):
        run_claim.claim(str(run), "job")
    assert not (place / "mine.db").exists()


def test_another_user_cannot_decide_where_a_job_records(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory of several users each has an own record of jobs; a record never names a directory elsewhere."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("DISTDIAG_RUN_DIR", raising=False)
    records, elsewhere = place / "reports" / ".jobs", place / "elsewhere"
    records.mkdir(parents=True)
    elsewhere.mkdir()
    (records / f"{run_claim.job_token()}.0").write_text(f"{elsewhere}\n")
    mine = run_claim.claim(None, "job")  # it looks like a record of ours: only its name counts
    assert mine.parent == place / "reports" and mine.name == "elsewhere"
    owned_by_other(records)
    mine = run_claim.claim(None, "job")
    assert mine.parent == place / "reports" and mine.name.endswith("-job")
    assert (place / "reports" / f".jobs-{os.getuid()}").stat().st_mode & 0o022 == 0
    assert list(elsewhere.iterdir()) == []
