"""`distdiag history`: what it counts, what it skips, and what a person's SQL cannot do."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("duckdb")

from msgspec.structs import replace

from distdiag.cli import main
from distdiag.diagnosis.model.findings import Where
from distdiag.history.answers import Answers, answers
from distdiag.history.collect import HistoryRow, read_runs, runs_in
from distdiag.history.database import COLUMNS, History
from tests.history.runs import DAY, STRAGGLER, TUESDAY, hang, write_fleet, write_run
from tests.jobs import REPOSITORY, clean_env


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fleet")
    write_fleet(directory)
    return directory


def asked(directory: Path) -> Answers:
    history = History()
    rows, broken = read_runs(runs_in(directory))
    assert broken == []
    history.add(rows)
    history.lock()
    found = answers(history)
    history.close()
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["history", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_host_is_counted_in_the_runs_that_it_took_part_in(fleet: Path) -> None:
    found = {(h.host, h.kind): h for h in asked(fleet).hosts}
    straggler = found["node1", "straggler"]
    assert (straggler.count, straggler.runs) == (12, 18)
    assert straggler.ci95 == pytest.approx((0.4375, 0.8372), abs=1e-3)  # Wilson, by hand
    assert (found["node0", "deadlock"].count, found["node0", "deadlock"].runs) == (3, 24)
    assert ("node2", "straggler") not in found


def test_a_line_is_counted_in_the_runs_of_its_job(fleet: Path) -> None:
    (line,) = asked(fleet).lines
    assert (line.file, line.line, line.function, line.kind) == ("/job/train.py", 88, "evaluate", "deadlock")
    assert (line.count, line.runs) == (3, 24)


def test_a_figure_that_fell_is_named_with_its_day_and_one_that_did_not_is_not(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (change,) = asked(fleet).changes
    assert change.what == "bus bandwidth of allreduce" and change.since_unix_s == pytest.approx(TUESDAY + 1.0, abs=DAY)
    assert change.ratio_ci95[0] < 0.5 < change.ratio_ci95[1] and change.ratio_ci95[1] < 0.55
    text = run(capsys, fleet)[1]
    assert "bus bandwidth of allreduce (node0,node1) fell on Tuesday 2026-11-24: 40" in text and "step time" not in text


def test_several_findings_of_one_run_count_once(tmp_path: Path) -> None:
    both = (hang(88), hang(90), STRAGGLER)
    for i in range(3):
        write_run(tmp_path / str(i), TUESDAY + i, findings=both)
    found = asked(tmp_path)
    assert {(h.host, h.kind, h.count, h.runs) for h in found.hosts} == {
        ("node0", "deadlock", 3, 3),
        ("node1", "straggler", 3, 3),
    }


def test_the_only_host_is_not_blamed_and_a_line_that_one_run_names_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        write_run(tmp_path / str(i), TUESDAY + i, hosts=("node0",), findings=(hang(88 + i),))
    text = run(capsys, tmp_path)[1]
    assert "node0" not in text and "3 runs, Tuesday 2026-11-24: 3 ended" in text
    assert f"train.py:89 in evaluate: deadlock in {tmp_path}/1" in " ".join(text.split())


def test_a_line_is_the_first_site_of_its_rank_as_diagnose_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = (
        Where(1, f"{tmp_path}/long/way/x/../evaluation.py", 13, "validate"),
        Where(1, "/job/spawn.py", 5, "worker"),
    )
    write_run(tmp_path / "runs/a_run_with_a_name_of_its_own", TUESDAY, findings=(replace(hang(1), where=sites),))
    monkeypatch.chdir(tmp_path)
    text = run(capsys, "runs")[1]
    assert "  long/way/evaluation.py:13 in validate: deadlock" in text and "spawn.py" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_databases_of_single_nodes_are_not_counted_again(tmp_path: Path) -> None:
    write_run(tmp_path / "a", TUESDAY, findings=(STRAGGLER,))
    write_run(tmp_path / "a/node_1", TUESDAY, findings=(STRAGGLER,))
    write_run(tmp_path / "a/attempt_1", TUESDAY, findings=(STRAGGLER,))
    assert asked(tmp_path).runs == 2


def fingerprint(directory: Path) -> dict[str, tuple[int, int, str]]:
    return {
        str(p): (
            p.stat().st_mtime_ns,
            p.stat().st_mode,
            hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "",
        )
        for p in sorted(directory.rglob("*"))
    }


def test_the_runs_are_not_changed(fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(fleet)
    assert run(capsys, fleet, "--parquet", tmp_path / "x.parquet")[0] == 0
    assert fingerprint(fleet) == before


def test_what_cannot_be_read_is_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good", TUESDAY)
    for name in ("noise", "link", "fifo", "newer", "wrong"):
        (tmp_path / name).mkdir()
    (tmp_path / "noise/run.db").write_bytes(os.urandom(9000))
    (tmp_path / "link/run.db").symlink_to(tmp_path / "good/run.db")
    os.mkfifo(tmp_path / "fifo/run.db")
    write_run(tmp_path / "newer", TUESDAY)
    with sqlite3.connect(tmp_path / "newer/run.db") as con:
        con.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    con.close()
    write_run(tmp_path / "wrong", TUESDAY)
    with sqlite3.connect(tmp_path / "wrong/run.db") as con:  # types that no version writes
        con.execute("UPDATE meta SET value = x'ff' WHERE key IN ('started_unix_s', 'world_size', 'name')")
        con.execute("UPDATE rank SET host = x'00', step = 'many'")
        con.execute("INSERT INTO finding (key, kind, json) VALUES ('k', 'deadlock', '{\"kind\": 7}')")
    con.close()
    code, out, err = run(capsys, tmp_path)
    assert code == 0 and "2 runs" in out.splitlines()[0]
    for name in ("noise", "link", "fifo", "newer"):
        assert f"skipped {tmp_path}/{name}" in err
    assert "Traceback" not in err and f"{tmp_path}/wrong" not in err


def test_text_of_a_job_is_made_visible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        write_run(tmp_path / str(i), TUESDAY, name="a\x1b[31m\nb", hosts=("h\x1b]0;x\x07", "n"), findings=(hang(88),))
    _, out, _ = run(capsys, tmp_path)
    assert "\x1b" not in out and "\x07" not in out and "deadlock in 2 of 2" in out


# -- Parquet and SQL ----------------------------------------------------------------------------------------------


def test_a_parquet_file_answers_as_its_runs(fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "it's [1]*.parquet"
    _, out, err = run(capsys, fleet, "--parquet", file)
    assert f"wrote {file}" in err and [p.name for p in tmp_path.iterdir()] == [file.name]
    assert run(capsys, file)[1] == out
    code, _, err = run(capsys, fleet, "--parquet", file)
    assert code == 2 and "exists" in err and "--force" in err
    assert run(capsys, fleet, "--parquet", file, "--force")[0] == 0


def test_there_is_a_row_per_run_host_rank_and_finding(fleet: Path) -> None:
    rows, _ = read_runs(runs_in(fleet))
    of_a_run = [r for r in rows if r.run.endswith("run-003")]
    assert [(r.host, r.rank, r.kind) for r in of_a_run if r.rank is not None] == [
        ("node0", 0, None), ("node0", 1, "deadlock"), ("node1", 2, "straggler"), ("node1", 3, None),
    ]  # fmt: skip
    assert [(r.probe, r.bus_bandwidth_bytes_per_s is not None) for r in of_a_run if r.probe] == [("allreduce", True)]
    assert list(COLUMNS) == list(HistoryRow.__struct_fields__)


def test_own_questions_are_asked_with_sql(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "SELECT host, count(DISTINCT run) AS n FROM findings WHERE kind = 'straggler' GROUP BY host"
    code, out, _ = run(capsys, fleet, "--sql", sql)
    assert code == 0 and [line.split() for line in out.splitlines()] == [["host", "n"], ["node1", "12"]]
    code, out, _ = run(capsys, fleet, "--sql", sql, "--output-format", "json")
    assert json.loads(out) == {
        "schema": "distdiag.history_rows/1", "columns": ["host", "n"], "rows": [["node1", 12]], "cut": False,
    }  # fmt: skip
    assert run(capsys, fleet, "--sql", "SELECT * FROM runs, ranks, probes LIMIT 1")[0] == 0


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        "COPY history TO '{out}'",
        "COPY (SELECT 1) TO '{out}'",
        "ATTACH '{out}' AS other",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "EXPORT DATABASE '{out}'",
        "DROP TABLE history",
        "SELECT 1; SELECT 2",
        "SELECT getenv('HOME')",
        "SELEKT",
        "",
    ],
)
def test_sql_reaches_nothing_but_the_rows(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sql: str
) -> None:
    code, out, err = run(capsys, fleet / "run-003", "--sql", sql.format(out=tmp_path / "out"))
    assert code == 2 and out == "" and len(err.splitlines()) == 2, (out, err)
    assert list(tmp_path.iterdir()) == []


def test_sql_has_limits_on_time_and_rows(
    fleet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distdiag.cli.history.LIMIT_S", 0.3)
    endless = "SELECT count(*) FROM range(1000000000) a, range(1000000000) b"
    code, _, err = run(capsys, fleet / "run-003", "--sql", endless)
    assert code == 5 and "longer than 0.3 s" in err
    monkeypatch.setattr("distdiag.cli.history.LIMIT_S", 30.0)
    monkeypatch.setattr("distdiag.cli.history.MOST_ROWS", 10)
    code, out, err = run(capsys, fleet / "run-003", "--sql", "SELECT * FROM range(1000)")
    assert code == 0 and len(out.splitlines()) == 11 and "the first 10 rows" in err


def test_a_query_that_duckdb_does_not_interrupt_ends_the_command(fleet: Path, tmp_path: Path) -> None:
    code = (
        "import sys, distdiag.cli.history as h; from distdiag.cli import main; h.LIMIT_S = h.GRACE_S = 0.5;"
        "sys.exit(main(['history', sys.argv[1], '--sql', 'SELECT list_sort(range(90000000))']))"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(fleet)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=clean_env(tmp_path / "home"),
        cwd=REPOSITORY,
    )
    assert (done.returncode, done.stdout) == (5, ""), done.stderr
    assert done.stderr.splitlines() == ["distdiag: error: --sql takes longer than 0.5 s", "hint: ask for less"]
    assert time.monotonic() - began < 60


@pytest.mark.timeout(60)
def test_the_name_of_a_parquet_file_is_no_pattern(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a[b]*'.parquet", "ab1.parquet"):
        assert run(capsys, fleet / "run-003", "--parquet", Path(name))[0] == 0
    one, both = (run(capsys, *names, "--output-format", "json")[1] for names in (["a[b]*'.parquet"], ["ab1.parquet"]))
    assert json.loads(one)["rows"] == json.loads(both)["rows"]
    os.mkfifo("pipe.parquet")
    code, _, err = run(capsys, Path("pipe.parquet"))
    assert code == 2 and "is not a file" in err


# -- exit codes ----------------------------------------------------------------------------------------------------


def test_exit_codes_are_those_of_the_contract(
    tmp_path: Path, fleet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys)[0] == 2
    assert run(capsys, tmp_path / "absent")[0] == 4
    assert run(capsys, tmp_path)[0] == 4
    (tmp_path / "a.parquet").write_text("no parquet")
    code, _, err = run(capsys, tmp_path / "a.parquet")
    assert code == 2 and "is no history" in err
    assert run(capsys, fleet, "--parquet", tmp_path / "no/such/x.parquet")[0] == 2
    assert run(capsys, fleet, "--output-format", "json")[0] == 0
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, _, err = run(capsys, fleet)
    assert code == 2 and "pip install duckdb" in err


def test_another_parquet_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import duckdb

    with duckdb.connect() as con:
        con.execute(f"COPY (SELECT 1 AS run) TO '{tmp_path}/other.parquet' (FORMAT parquet)")
    code, _, err = run(capsys, tmp_path / "other.parquet")
    assert code == 2 and "is no history" in err


def test_a_run_without_ranks_is_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", TUESDAY, hosts=())
    assert asked(tmp_path).runs == 1


def forged(path: Path, line: int, culprits: int, started: str) -> Path:
    write_run(path, TUESDAY)
    finding = {
        "kind": "deadlock", "cause": "order_mismatch", "severity": "error", "culprits": list(range(culprits)), "message": "m",
        "where": [{"rank": 1, "file": "a.py", "line": line}],
    }  # fmt: skip
    with sqlite3.connect(path / "run.db") as con:
        con.execute("INSERT INTO finding (id, json) VALUES (7, ?), (8, ?)", [json.dumps(finding)] * 2)
        con.execute("UPDATE meta SET value = ? WHERE key = 'started_unix_s'", (started,))
    return path


@pytest.mark.parametrize("started", ["1e18", "-1e15"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_with_impossible_numbers_in_a_name_that_is_no_text_costs_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], started: str, as_json: bool
) -> None:
    forged(tmp_path / os.fsdecode(b"run-\xff"), (1 << 63) + 5, 2, started)
    (tmp_path / os.fsdecode(b"empty-\xff")).mkdir()
    (tmp_path / os.fsdecode(b"empty-\xff") / "run.db").touch()
    write_run(tmp_path / "sound", TUESDAY)
    code, out, err = run(capsys, tmp_path, *(["--output-format", "json"] if as_json else []))
    assert code == 0 and "\\udcff" in err
    assert json.loads(out)["runs"] == 2 if as_json else out.startswith("2 runs, ")


def test_a_finding_of_more_ranks_than_any_job_has_does_not_fill_the_memory(tmp_path: Path) -> None:
    forged(tmp_path / "run", 1, 101_000, "1e9")
    rows, ((_, why),) = read_runs(runs_in(tmp_path))
    assert (rows, why) == ([], "damaged: ValueError")


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    """Root may list every directory: this one is gone."""
    refused: list[OSError] = []
    assert not list(runs_in(tmp_path / "gone", refused.append))
    assert [e.filename for e in refused] == [str(tmp_path / "gone")]
