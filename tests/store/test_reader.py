"""Readers: unreadable runs are named with a status and a next step; frames at earlier times; live and dead monitors."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distdiag.errors import DistdiagError, ExitCode
from distdiag.report.steps import read_steps
from distdiag.store import checked, liveness, rundir, stacks
from distdiag.store.frames import RankRow
from distdiag.store.liveness import Monitor
from distdiag.store.opening import ReadStatus, RunUnreadable
from distdiag.store.reader import open_run
from distdiag.store.rows import StepRow, StepTimesRow
from distdiag.store.writer import Writer


def _run(path: Path, frames: int = 5) -> Path:
    with Writer(path) as w:
        for i in range(frames):
            w.frame(float(i), "running", "", [RankRow(rank=0, step=i)])
    return path


def _status(path: Path) -> ReadStatus:
    with pytest.raises(RunUnreadable) as e:
        open_run(path).latest_frame()
    assert e.value.message and e.value.hint and "\n" not in e.value.message
    return e.value.status


def test_frames_at_earlier_times_are_read(tmp_path: Path) -> None:
    with open_run(_run(tmp_path)) as run:
        assert [t_s for (t_s,) in run.query("SELECT t_s FROM frame ORDER BY t_s")] == [0.0, 1.0, 2.0, 3.0, 4.0]
        at = run.frame_at(2.7)
        assert at is not None and at.t_s == 2.0 and at.ranks[0].step == 2
        assert (before := run.frame_at(-1.0)) is not None and before.t_s == 0.0
        assert run.frame_step(2.0, 1) == 3.0 and run.frame_step(2.0, -2) == 0.0 and run.frame_step(2.0, 10) == 4.0
        assert run.frame_step(4.0, 1) == 4.0


def test_an_unreadable_run_is_named_with_the_reason(tmp_path: Path) -> None:
    assert _status(tmp_path / "none") is ReadStatus.DELETED
    (tmp_path / "starting").mkdir()
    assert _status(tmp_path / "starting") is ReadStatus.MISSING
    (tmp_path / "starting" / "run.db").touch()
    assert _status(tmp_path / "starting") is ReadStatus.MISSING
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "run.db").write_text("not a database, " * 100)
    assert _status(tmp_path / "text") is ReadStatus.CORRUPT
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    con = sqlite3.connect(foreign / "run.db")
    con.execute("CREATE TABLE t (x)")
    con.commit()
    con.close()
    assert _status(foreign) is ReadStatus.OLDER
    for version, status in ((0, ReadStatus.OLDER), (99, ReadStatus.NEWER)):
        path = _run(tmp_path / f"v{version}")
        con = sqlite3.connect(path / "run.db")
        con.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(version),))
        con.commit()
        con.close()
        assert _status(path) is status
    away = tmp_path / "away"
    away.mkdir()
    (away / rundir.POINTER).write_text('{"host": "node-far-away", "path": "/tmp/x/run.db"}')
    assert _status(away) is ReadStatus.ELSEWHERE


def test_columns_that_an_older_version_did_not_write_are_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Writer(path) as w:
        w.add([StepRow(rank=0, step=1, step_ms=5.0, comm_ms=2.0, exposed_ms=1.0)])
    with open_run(path) as run:
        assert run.step_values(["exposed_ms"], 1, 1, [0]) == [(1, 0, 1.0)]
    con = sqlite3.connect(path / "run.db")
    con.executescript("ALTER TABLE step DROP COLUMN comm_ms; ALTER TABLE step DROP COLUMN exposed_ms; DROP TABLE ddp")
    con.close()
    with open_run(path) as run:
        assert run.ddp() == [] and run.step_values(["exposed_ms"], 1, 1, [0]) == [(1, 0, None)]
        for steps in (run.steps(1, 1), run.steps(1, 1, [0])):
            assert [(x.step_ms, x.comm_ms, x.exposed_ms) for x in steps] == [(5.0, None, None)]
        assert np.isnan(read_steps(run)["exposed_ms"]).all()


def test_ddp_times_are_added_to_a_written_step(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Writer(path) as w:
        w.add([StepRow(rank=0, step=1, step_ms=5.0), StepRow(rank=1, step=1, step_ms=5.0)])
        w.commit()
        w.step_times([StepTimesRow(rank=1, step=1, comm_ms=2.0, exposed_ms=1.0)])
    with open_run(path) as run:
        assert [(x.rank, x.comm_ms, x.exposed_ms) for x in run.steps(1, 1)] == [(0, None, None), (1, 2.0, 1.0)]


def test_damage_in_the_middle_of_the_file_is_corrupt(tmp_path: Path) -> None:
    path = _run(tmp_path, 2000) / "run.db"
    data = bytearray(path.read_bytes())
    data[3 * 4096 :] = os.urandom(len(data) - 3 * 4096)
    path.write_bytes(data)
    with pytest.raises(RunUnreadable) as e, open_run(tmp_path) as run:
        [run.frame_at(float(t_s)) for t_s in range(2000)]
    assert e.value.status is ReadStatus.CORRUPT


def test_a_locked_database_is_reported_quickly(tmp_path: Path) -> None:
    _run(tmp_path)
    holder = sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")  # in rollback mode this also keeps readers out
    try:
        assert _status(tmp_path) is ReadStatus.LOCKED
    finally:
        holder.close()


def test_a_run_deleted_while_open_is_reported(tmp_path: Path) -> None:
    path = _run(tmp_path / "r")
    with open_run(path) as run:
        run.check()
        shutil.rmtree(path)
        with pytest.raises(RunUnreadable) as e:
            run.check()
        assert e.value.status is ReadStatus.DELETED
        _run(path)
        with pytest.raises(RunUnreadable):
            run.check()  # another run under the same name is not the one that was opened


def test_readers_see_a_live_writer_and_its_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, time\nfrom distdiag.store.writer import Writer\nfrom distdiag.store.frames import RankRow\n"
        "w = Writer(sys.argv[1])\nw.frame(1.0, 'running', '', [RankRow(rank=0, step=1)])\nassert w.commit()\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with open_run(tmp_path) as run:
            assert run.monitor() is Monitor.LIVE
            process.kill()
            process.wait()
            monkeypatch.setattr(liveness, "SILENT_S", 1.0)
            frame = run.latest_frame()  # committed rows survive the writer
            assert frame is not None and frame.ranks[0].step == 1
            deadline = time.monotonic() + 20
            while run.monitor() is not Monitor.GONE:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert "gone" in run.report().notes[0]
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def test_a_run_whose_writer_was_killed_in_a_transaction_is_undone_by_one_command(tmp_path: Path) -> None:
    """A reader changes nothing; SQLite undoes it for whoever may write."""
    path = _run(tmp_path / "r", frames=400)
    code = (
        "import os, sqlite3, sys\ncon = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "con.execute('PRAGMA cache_size = 1')\ncon.execute('BEGIN')\ncon.execute('DELETE FROM frame')\n"
        "con.execute('CREATE TABLE filler AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9999) SELECT i FROM n')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path / "run.db")], check=False, timeout=60)
    assert (path / "run.db-journal").stat().st_size > 0
    with pytest.raises(RunUnreadable) as e:
        open_run(path)
    assert e.value.status is ReadStatus.UNREADABLE and f"`sqlite3 {path}/run.db .tables` undoes" in e.value.hint
    with sqlite3.connect(path / "run.db") as con:
        con.execute("SELECT name FROM sqlite_master")
    con.close()
    with open_run(path) as run:
        frame = run.latest_frame()
        assert frame is not None and frame.ranks[0].step == 399


def test_a_reader_sees_all_tables_or_none_while_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "run.db"
    con = sqlite3.connect(database)
    con.execute("PRAGMA journal_mode = WAL")
    try:
        assert _status(tmp_path) is ReadStatus.MISSING
        fetch, made = checked.fetch, []

        def slow(*args: Any) -> list[tuple[Any, ...]]:
            found = fetch(*args)
            if "sqlite_master WHERE" in args[1] and not made:
                made.append(con.executescript(checked.SCHEMA.read_text()))
            return found

        monkeypatch.setattr(checked, "fetch", slow)
        assert _status(tmp_path) is ReadStatus.MISSING and made
    finally:
        con.close()


def test_a_finished_run_reads_on_a_read_only_disk(tmp_path: Path) -> None:
    path = _run(tmp_path / "r")
    con = sqlite3.connect(path / "run.db")
    con.execute("PRAGMA journal_mode = WAL")  # as left by a reader that was connected at the end
    con.close()
    path.chmod(0o555)
    (path / "run.db").chmod(0o444)
    try:
        with open_run(path) as run:
            assert run.latest_frame() is not None
    finally:
        path.chmod(0o755)


def test_a_run_is_resolved_from_option_environment_and_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(rundir.ENV, raising=False)
    with pytest.raises(DistdiagError) as e:
        rundir.resolve()
    assert e.value.code is ExitCode.NO_DATA and "torchrun" in e.value.hint
    a, b = _run(tmp_path / "reports" / "a"), _run(tmp_path / "reports" / "b")
    assert rundir.mark_latest(a) and rundir.mark_latest(b)
    assert rundir.resolve().resolve() == b
    assert rundir.resolve("reports").resolve() == b
    assert rundir.resolve("reports/a/run.db").resolve() == a
    monkeypatch.setenv(rundir.ENV, str(a))
    assert rundir.resolve() == a and rundir.resolve(b) == b
    _run(a / "attempt_1")
    _run(a / "attempt_10")
    assert rundir.resolve() == a / "attempt_10" and rundir.resolve(a / "attempt_1") == a / "attempt_1"
    assert [p.name for p in rundir.attempts(a / "attempt_1")] == ["a", "attempt_1", "attempt_10"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DistdiagError) as e:
        rundir.resolve("empty")
    assert e.value.code is ExitCode.NO_DATA


def test_the_newest_run_here_may_have_a_name_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(rundir.ENV, raising=False)
    for path, started_s in (
        ("reports/20310302-090000-fit", 100.0),
        ("mine", 200.0),
        ("reports/20310302-090500-fit", 300.0),
    ):
        run = _run(tmp_path / path)
        assert rundir.write_run_json(run, {"started_unix_s": started_s}) and rundir.mark_latest(run)
        assert rundir.resolve().resolve() == run


def test_latest_never_raises_and_never_replaces_a_real_directory(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    assert rundir.mark_latest(tmp_path / "r") is False and (tmp_path / "latest").is_dir()
    assert rundir.mark_latest(tmp_path / "missing" / "r") is False


@pytest.mark.parametrize("target", ["step_1000", "/data/step_1000", "gone", "sub/step_1000"])
def test_a_link_named_latest_to_something_else_is_kept(tmp_path: Path, target: str) -> None:
    """A directory of checkpoints with --run-dir in it."""
    for name in ("step_1000", "sub/step_1000"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "latest").symlink_to(target)
    _run(tmp_path / "run")
    assert rundir.mark_latest(tmp_path / "run") is False
    assert os.readlink(tmp_path / "latest") == target


def test_a_link_to_a_run_that_was_deleted_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("20250101-120000-train")
    run = _run(tmp_path / "20250102-120000-train")
    assert rundir.mark_latest(run) and (tmp_path / "latest").resolve() == run


def test_run_directories_are_new_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = rundir.default_run_dir("../my job\n!").absolute()
    assert one.parent == tmp_path / "reports" and "\n" not in one.name and " " not in one.name
    one.mkdir(parents=True)
    assert rundir.default_run_dir("../my job\n!").absolute() != one
    assert rundir.write_run_json(one, {"argv": ["train.py"]}) and rundir.read_run_json(one) == {"argv": ["train.py"]}


def test_stacks_merge_into_a_tree_with_the_odd_one_last(tmp_path: Path) -> None:
    common = ("main train.py:10", "step train.py:20")
    rank = stacks.RankStack
    s = stacks.Stacks(
        t_s=3.0,
        ranks={
            "0": rank(stack=(*common, "all_reduce train.py:30"), op="all_reduce #4 default_pg"),
            "1": rank(stack=(*common, "evaluate train.py:40")),
            "2": rank(stack=(*common, "all_reduce train.py:30"), op="all_reduce #4 default_pg"),
            "3": rank(note="did not answer within 2 s"),
        },
    )
    stacks.write(tmp_path, s)
    again = stacks.read(tmp_path)
    assert again == s
    root, silent = stacks.merge(s)
    assert root.ranks == [0, 1, 2] and silent.ranks == [3] and "did not answer" in silent.frame
    assert [b.ranks for b in root.children[0].children] == [[0, 2], [1]]
    (tmp_path / stacks.NAME).write_text("{")
    assert stacks.read(tmp_path) is None


def test_the_users_own_frames_are_marked() -> None:
    torch = "/venv/lib/python3.11/site-packages/torch/_tensor.py"
    stack = (
        "main /home/me/my job/train.py:10",
        f"backward {torch}:623",
        "in a worker of its data loader: read /home/me/set.py:3",
    )
    lines = stacks.tree_lines(
        stacks.merge(stacks.Stacks(t_s=1.0, ranks={"0": stacks.RankStack(stack=stack, op="barrier #4 default_pg")}))
    )
    assert [x.strip() for x in lines] == [
        f"1 rank (0)  > {stack[0]}",
        stack[1],
        f"> {stack[2]}",
        "in barrier #4 default_pg",
    ]


def test_the_store_imports_nothing_heavy() -> None:
    code = (
        "import sys, distdiag.store.writer, distdiag.store.reader, distdiag.store.rundir, distdiag.store.stacks\n"
        "print(sorted({'torch', 'pandas', 'numpy', 'textual', 'rich'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
