"""A run directory from an unknown sender: no traceback, no hang, bounded memory, and no signal to another process."""

from __future__ import annotations

import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest

from distdiag import procfs
from distdiag.cli import main
from distdiag.errors import DistdiagError
from distdiag.monitor.evidence import dump
from distdiag.page import directories
from distdiag.page.layout import page_path
from distdiag.page.writer import PageWriter
from distdiag.store import rundir, stacks
from distdiag.store.frames import RankRow, unpack_table
from distdiag.store.opening import ReadStatus, RunUnreadable
from distdiag.store.reader import open_run
from distdiag.store.writer import Writer

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
MORE_TABLES = f"BEGIN; {' '.join(f'CREATE TABLE more_{n} (x);' for n in range(1000))} COMMIT"


def run_with(path: Path, *statements: str) -> Path:
    with Writer(path) as w:
        w.frame(1.0, "running", "", [RankRow(rank=0)])
    con = sqlite3.connect(path / "run.db")
    for statement in statements:
        con.executescript(statement)
    con.close()
    return path


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP TABLE rank", f"CREATE VIEW rank AS {ENDLESS} SELECT i AS rank FROM n"),
        ("DROP TABLE meta", f"CREATE VIEW meta AS {ENDLESS} SELECT i AS key, i AS value FROM n"),
        ("ALTER TABLE event ADD COLUMN x TEXT AS (hex(zeroblob(100000000)))",),
        ("DROP TABLE rank", "CREATE VIEW RANK AS SELECT 'no number' AS rank"),
        ("DROP TABLE event", "CREATE VIRTUAL TABLE EVENT USING fts5(t_s, source, level, text)"),
        ("DROP TABLE rank", MORE_TABLES, "CREATE VIEW rank AS SELECT 'no number' AS rank"),
    ],
)
def test_views_and_computed_columns_are_refused(tmp_path: Path, statements: tuple[str, ...]) -> None:
    with pytest.raises(RunUnreadable) as e:
        open_run(run_with(tmp_path, *statements))
    assert e.value.status is ReadStatus.CORRUPT


def test_names_in_upper_case_have_checked_types(tmp_path: Path) -> None:
    """SQLite finds them by their names in lower case."""
    run_with(
        tmp_path,
        "DROP TABLE event",
        "CREATE TABLE EVENT (T_S, SOURCE, LEVEL, TEXT)",
        "INSERT INTO event VALUES (1.0, 'monitor', 'info', 'whole'), ('late', 'monitor', 'info', 'whole'), (1.0, 2, 3, x'00')",
    )
    with open_run(tmp_path) as run:
        assert [(e.t_s, e.text) for e in run.events()] == [(1.0, "whole"), (None, "whole")]


def test_a_value_of_meta_is_limited_in_size(tmp_path: Path) -> None:
    run_with(tmp_path, "INSERT OR REPLACE INTO meta VALUES ('command', printf('%.*c', 30000000, 'x'))")
    with open_run(tmp_path) as run:
        assert 0 < len(run.meta["command"] or "") <= 1 << 20


def test_a_schema_that_is_not_text_is_damage(tmp_path: Path) -> None:
    """SQLite's message quotes it, and Python cannot decode the message."""
    run_with(
        tmp_path,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET name = CAST(x'eeff' AS TEXT), sql = 'CREATE TABLE' WHERE name = 'event'",
    )
    with pytest.raises(RunUnreadable) as e:
        open_run(tmp_path)
    assert e.value.status is ReadStatus.CORRUPT


def test_a_stray_wal_file_makes_a_reader_create_or_delete_nothing(tmp_path: Path) -> None:
    """SQLite opens any file of that name as a log, whatever the header of the database says."""
    run = run_with(tmp_path, "PRAGMA journal_mode = DELETE")
    (run / "run.db-wal").write_bytes(b"x")
    before = sorted(path.name for path in run.iterdir())
    with open_run(run) as opened:
        assert opened.meta
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_time_that_is_no_float_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(tmp_path / "R")
    (run / "run.json").write_text('{"started_unix_s": 1' + "0" * 400 + "}")
    (tmp_path / "latest").symlink_to("R")
    monkeypatch.chdir(tmp_path)
    assert rundir.resolve(None).resolve() == run


def test_an_endless_query_is_stopped_by_what_the_disk_holds_of_a_sparse_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distdiag.store.checked.QUERY_S", 0.5)
    os.truncate(run_with(tmp_path, "PRAGMA journal_mode = DELETE") / "run.db", 1 << 40)
    with open_run(tmp_path) as run, pytest.raises(RunUnreadable, match=r"more than [01] s"):
        run.query(f"{ENDLESS} SELECT count(*) FROM n")


def test_values_of_another_type_are_not_measured(tmp_path: Path) -> None:
    path = run_with(
        tmp_path,
        "INSERT INTO frame VALUES (9e999, 'running', '', x'00')",
        "INSERT INTO rank (rank, step, host) VALUES (3, 'many', x'00'), (1000000000, 1, 'a')",
        "INSERT INTO event VALUES ('late', 1, x'00', x'00')",
        "UPDATE meta SET value = 'running' || char(27) || ']0;x' WHERE key = 'state'",
        "INSERT OR REPLACE INTO meta VALUES ('state', char(27)), ('world_size', '9e999')",
        "INSERT INTO pgroup VALUES ('g', '', '', 2, '0-100000000000'), ('h', '', '', 2, '0-1')",
        """INSERT INTO finding (key, json) VALUES ('a', '{"kind": "stall", "severity": "worst"}'),
           ('b', '{"kind": "stall", "culprits": [1000000000000]}'), ('c', CAST(x'ff' AS TEXT))""",
    )
    with open_run(path) as run:
        assert [(r.rank, r.step, r.host) for r in run.ranks() if r.rank] == [(3, None, "")]
        assert [t_s for (t_s,) in run.query("SELECT t_s FROM frame ORDER BY t_s")] == [1.0]
        assert run.events() == []  # a row is whole, or it is not there
        report = run.report()
        assert (report.state, report.world_size, report.findings) == ("waiting", None, ())
        assert {g.name: g.ranks for g in run.groups()} == {"g": (), "h": (0, 1)}


def packed(n: int, **columns: object) -> bytes:
    words = columns.pop("words", {})
    return zlib.compress(msgspec.msgpack.encode({"n": n, "numbers": columns, "words": words}))


@pytest.mark.parametrize(
    "blob",
    [
        zlib.compress(bytes(200 << 20)),
        packed(1 << 40),
        packed(2, rank=("d", bytes(8))),
        packed(1, rank=("u", bytes(4))),
        packed(1),
        packed(1, rank=("d", b"\0\0\0\0\0\0\xf0\x7f")),
        packed(1, rank=("d", bytes(8)), words={"host": (["a", "b"], "H", b"\xff\xff")}),
    ],
    ids=["a bomb", "too many ranks", "too short", "an unknown code", "no ranks", "an infinite rank", "no such word"],
)
def test_frames_are_checked(blob: bytes) -> None:
    with pytest.raises((ValueError, zlib.error, msgspec.DecodeError)):
        unpack_table(blob)


def test_json_of_any_depth_and_encoding_is_handled(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    for content in (b"[" * 100_000, b'{"a": "\xff"}', b'{"host": "h", "path": ' + b"[" * 100_000):
        for name in ("run.json", rundir.POINTER, stacks.NAME):
            (tmp_path / name).write_bytes(content)
        assert rundir.read_run_json(tmp_path) == {} and stacks.read(tmp_path) is None
        with pytest.raises(DistdiagError):
            open_run(tmp_path)


def test_commands_to_copy_are_quoted(tmp_path: Path) -> None:
    (tmp_path / rundir.POINTER).write_text('{"host": "-oProxyCommand=x; rm\\u001b[2J", "path": "/nowhere"}')
    with pytest.raises(RunUnreadable) as e:
        open_run(tmp_path)
    assert "ssh" not in e.value.hint and "\x1b" not in e.value.hint + e.value.message
    (folder := tmp_path / "a; b").mkdir()
    (folder / rundir.POINTER).write_text('{"host": "node1", "path": "/nowhere"}')
    with pytest.raises(RunUnreadable) as e:
        open_run(folder)
    command = e.value.hint.strip("`")
    there = shlex.split(command)[2:]  # what ssh passes to the remote shell, joined with spaces
    assert shlex.split(" ".join(there)) == ["distdiag", "tui", str(folder)]


@pytest.mark.parametrize("end", ["", "-journal", "-wal", "-shm"])
def test_a_fifo_is_refused_as_a_database(tmp_path: Path, end: str) -> None:
    """SQLite would wait for its writer forever."""
    if end:
        run_with(tmp_path, f"PRAGMA journal_mode = {'DELETE' if end == '-journal' else 'WAL'}")
    (tmp_path / f"run.db{end}").unlink(missing_ok=True)
    os.mkfifo(tmp_path / f"run.db{end}")
    with pytest.raises(RunUnreadable, match="is not a file"):
        open_run(tmp_path)


def test_a_crafted_page_cannot_signal_another_process(tmp_path: Path) -> None:
    """The page names a process that would die of the signal; it does not map the page, and gets none."""

    victim = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdin=subprocess.DEVNULL)
    try:
        pages = directories.overflow(tmp_path, 0)
        directories.make(pages)
        directories.node_record(tmp_path, 0).write_text(f"launcher {pages}\n")
        writer = PageWriter(page_path(pages, 0))
        writer.header.pid, writer.header.trace_signal = victim.pid, int(signal.SIGTERM)
        writer.header.process_start_ticks = procfs.start_ticks(victim.pid) or 0
        writer.header.started_mono_ns = 1
        writer.publish()
        with pytest.raises(DistdiagError, match="is alive"):
            dump.take(tmp_path, 0.2)
        assert victim.poll() is None
        assert procfs.maps(os.getpid(), page_path(pages, 0))
        assert not procfs.maps(victim.pid, page_path(pages, 0))
    finally:
        victim.kill()
        victim.wait()


def test_a_dump_of_a_damaged_page_has_the_other_ranks(tmp_path: Path) -> None:
    """The stack of rank 1 points to no text; its process lives and maps the page."""
    pages = directories.overflow(tmp_path, 0)
    directories.make(pages)
    directories.node_record(tmp_path, 0).write_text(f"launcher {pages}\n")
    held = []
    for rank in (0, 1):
        page = PageWriter(page_path(pages, rank))
        page.header.pid, page.header.rank, page.header.world_size, page.header.local_world_size = (
            os.getpid(),
            rank,
            2,
            2,
        )
        page.header.process_start_ticks = procfs.start_ticks(os.getpid()) or 0
        page.header.stack[0], page.header.stack_depth = page.site("/job/train.py", 7, "main"), 1
        if rank == 1:
            page.header.stack[0] = 1 << 63
        page.publish()
        held.append(page)
    _, found = dump.take(tmp_path, timeout_s=0.5)
    assert [d.rank for d in found] == [0, 1]
    assert found[0].frames == ("main /job/train.py:7",)
    assert not found[1].frames and "damaged" in (found[1].note or "")


@pytest.mark.parametrize(
    "command", [("diagnose", "--json"), ("tui", "--once", "--json"), ("report", "--format", "text")]
)
def test_a_run_below_a_path_that_is_no_text_with_an_impossible_start_is_read(
    tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / os.fsdecode(b"run-\xff")
    with Writer(path) as w:
        w.meta(started_unix_s=1e18, state="ended", ended_s=1.0, monitor_ended=1, world_size=1, checks="[]")
    assert main([*command, str(path)]) in (0, 3, 4)
    assert capsys.readouterr().out
