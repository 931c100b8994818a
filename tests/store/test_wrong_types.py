"""run.db with values of other types than the schema's: every column of every table, every wrong type, every reader."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from distdiag.cli import main
from distdiag.store.checked import schema
from distdiag.store.reader import open_run
from tests.report.runs import DEADLOCK, STRAGGLER, make_run

WRONG: tuple[Any, ...] = (
    None,
    -1,
    1 << 62,
    -(1 << 63),
    0.5,
    math.inf,
    -1e308,
    "",
    "text",
    "9" * 5000,
    "\x1b[2J\u202e",
    b"\xff",
    b"",
)
TOGETHER = 8
READERS = (
    ["diagnose"], ["diagnose", "--json"], ["diagnose", "--why", "straggler"],
    ["report", "--format", "text", "-o", "-"], ["report", "--format", "json", "-o", "-"], ["report", "--format", "perfetto", "-o", "-"],
    ["compare"], ["tui", "--once"], ["tui", "--once", "--json"],
)  # fmt: skip


def filled(path: Path) -> Path:
    """Make a run that has rows in every table."""
    make_run(path, ranks=2, steps=20, gpus=True, findings=(DEADLOCK, STRAGGLER), state="running")
    con = sqlite3.connect(path / "run.db")
    con.execute("PRAGMA journal_mode = DELETE")
    for table, columns in schema().items():
        if con.execute(f"SELECT count(*) FROM {table}").fetchone()[0] < 2:
            for n in range(2):
                row = [
                    n + 1 if kind == "INTEGER" else n + 0.5 if kind == "REAL" else f"{n}"
                    for kind, _ in columns.values()
                ]
                con.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    con.commit()
    con.close()
    return path


def spoil(con: sqlite3.Connection, table: str, column: str, values: tuple[Any, ...], every: int = 1) -> None:
    """Put wrong values into one column of every `every`-th row, one value after the other."""
    key = [r[1] for r in con.execute(f"PRAGMA table_info({table})") if r[5]] or ["rowid"]
    rows = con.execute(f"SELECT {', '.join(key)} FROM {table}").fetchall()
    where = " AND ".join(f"{k} IS ?" for k in key)
    for row, value in zip(rows[::every], itertools.cycle(values), strict=False):
        with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):  # a key that may not be so
            con.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value, *row))
    con.commit()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("whole") / "run")


def read_all(run: Path, other: Path) -> None:
    for reader in READERS:
        main([*reader, str(run), *([str(other)] if reader == ["compare"] else [])])


@pytest.mark.parametrize("table", schema())
def test_no_reader_fails_on_a_wrong_type_in_any_column(
    tmp_path: Path, whole: Path, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight columns at a time; half of the rows stay as they were, so that no column hides another one."""
    columns = list(schema()[table])
    for nth in range(0, len(columns), TOGETHER):
        run = Path(shutil.copytree(whole, tmp_path / str(nth)))
        con = sqlite3.connect(run / "run.db")
        for turn, column in enumerate(columns[nth : nth + TOGETHER]):
            spoil(con, table, column, WRONG[turn:] + WRONG[:turn], every=2)
        con.close()
        read_all(run, whole)
        out = capsys.readouterr()
        assert "Traceback (most recent" not in out.err and "\x1b[2J" not in out.out + out.err, columns[nth:]


def test_a_reader_sees_rows_of_the_declared_types_only(tmp_path: Path, whole: Path) -> None:
    """Also in sums, means and maxima, in which SQLite would count text as 0 or return it."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    con = sqlite3.connect(run / "run.db")
    con.execute("UPDATE step SET step_ms = 'long' WHERE step % 2 = 0")
    con.execute("UPDATE step SET wait_ms = x'00', loss = 9e999")
    con.execute("UPDATE event SET text = 7.5, level = x'00'")
    con.commit()
    con.close()
    with open_run(run) as opened:
        ((count, mean, most, wait, loss),) = opened.query(
            "SELECT count(step_ms), avg(step_ms), max(step_ms), max(wait_ms), max(loss) FROM step"
        )
        assert count == 20 and 50 < mean < 200 and type(most) is float and wait is None and loss == math.inf
        assert opened.events() == []
        assert opened.step_range() == (1, 20) or opened.step_range() == (0, 19)


def test_the_views_keep_the_indices(whole: Path) -> None:
    """The newest step of a run with a million is found by its key, not by reading all rows."""
    with open_run(whole) as run:
        for sql, kind in (
            ("SELECT max(step) FROM step", "SEARCH step"),
            ("SELECT min(t_end_s) FROM step WHERE step = 3", "SEARCH step USING PRIMARY KEY (step=?"),
            (
                "SELECT rank, step_ms FROM step WHERE step BETWEEN 3 AND 5 ORDER BY step, rank",
                "SEARCH step USING PRIMARY KEY",
            ),
            ("SELECT max(t_s) FROM frame", "SEARCH frame USING"),
            ("SELECT ranks FROM frame WHERE t_s <= 3 ORDER BY t_s DESC LIMIT 1", "SEARCH frame USING"),
        ):
            plan = [row[3] for row in run.query(f"EXPLAIN QUERY PLAN {sql}")]
            assert len(plan) == 1 and plan[0].replace("main.", "").startswith(kind), (sql, plan)
