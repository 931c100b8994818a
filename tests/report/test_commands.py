"""`distdiag report` and `distdiag compare`: files, outputs and exit codes."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from pathlib import Path

import pytest

from distdiag.cli import main
from distdiag.errors import DistdiagError
from distdiag.report.output import new_file
from tests.report.runs import DEADLOCK, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", ranks=2, steps=60, findings=(DEADLOCK,))


def test_html_goes_into_the_run_and_nothing_is_overwritten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    output = capsys.readouterr()
    assert output.out == f"{run / 'report.html'}\n" and "open it:" in output.err
    written = (run / "report.html").read_bytes()
    assert main(["report", str(run)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"distdiag: error: {run / 'report.html'} is there already",
        "hint: --force overwrites it, -o FILE writes another one",
    ]
    assert main(["report", str(run), "--force"]) == 0
    assert (run / "report.html").read_bytes() == written
    assert not list(run.glob(".*part"))


def test_text_and_json_go_to_standard_output(run: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["report", str(run), "--format", "text"]) == 0
    assert b"deadlock/missing_rank" in capsysbinary.readouterr().out
    assert main(["report", str(run), "--format", "json"]) == 0
    facts = json.loads(capsysbinary.readouterr().out)
    assert next(iter(facts)) == "schema" and facts["schema"] == "distdiag.report/1"
    assert facts["findings"][0]["kind"] == "deadlock"


def test_a_report_of_a_running_job_names_its_time(run: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def head(command: str, *options: str) -> list[bytes]:
        assert main([command, str(run), *options]) in (0, 1)
        return capsysbinary.readouterr().out.splitlines()[:8]

    assert b" so far" not in head("report", "--format", "text")[2]  # it has ended
    con = sqlite3.connect(run / "run.db")
    con.execute("DELETE FROM meta WHERE key = 'ended_s'")
    now = {"monitor_ended": "0", "state": "running", "heartbeat_unix_s": str(time.time() + 60.0)}
    con.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", now.items())
    con.commit()
    con.close()
    verdict, _, times, *_ = head("report", "--format", "text")
    assert times.endswith(b" so far") and verdict in head("diagnose")  # the same words, the same numbers
    assert main(["report", str(run), "-o", "-"]) == 0
    page = capsysbinary.readouterr().out
    assert b" so far</p>" in page and verdict.partition(b":")[2] in page


def test_a_trace_is_written_next_to_the_report(run: Path) -> None:
    assert main(["report", str(run), "--format", "perfetto", "--last-steps", "3"]) == 0
    assert json.loads((run / "trace.json").read_text())["traceEvents"]


def test_the_latest_run_is_the_default(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (run.parent / "reports").mkdir()
    (run.parent / "reports" / "latest").symlink_to(run)
    monkeypatch.chdir(run.parent)
    assert main(["report", "--format", "text"]) == 0
    assert b"cifar" in capsysbinary.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["report", "no/such/run"], 4, "no run directory no/such/run"),
        (["report", "{run}", "--format", "pdf"], 2, "Invalid value for '--format'"),
        (["report", "{run}", "--last-steps", "5"], 2, "--last-steps is for --format perfetto only"),
        (["report", "{run}", "-o", "{run}"], 2, "is a directory"),
        (["report", "{run}", "-o", "/proc/none/report.html"], 2, "there is no directory /proc/none"),
        (["compare", "{run}"], 2, "compare needs two runs"),
        (["compare", "{run}", "no/such/run"], 4, "no run directory no/such/run"),
        (["compare", "{run}", "{run}", "--skip", "-1"], 2, "Invalid value for '--skip'"),
    ],
)
def test_bad_input_is_an_error_line_and_a_hint(
    run: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, says: str
) -> None:
    assert main([a.format(run=run) for a in args]) == code
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == "" and len(lines) == 2
    assert lines[0].startswith("distdiag: error: ") and says in lines[0]
    assert lines[1].startswith("hint: ")


def test_a_file_that_is_not_a_database_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.db").write_bytes(b"not a database at all, but long enough to be read as a header of one" * 20)
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("distdiag: error: ")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_run_can_be_printed_but_not_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.chmod(0o555)
    try:
        assert main(["report", str(run)]) == 2
        assert "cannot write" in capsys.readouterr().err
        assert main(["report", str(run), "--format", "text"]) == 0
    finally:
        run.chmod(0o755)


def test_compare_names_the_slower_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = make_run(tmp_path / "old", seed=1), make_run(tmp_path / "new", slow_rank=1, slow_ms=15.0, seed=2)
    assert main(["compare", str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "new against old: slower, +1" in out and "step ms, median" in out
    assert main(["compare", str(old), str(new), "--fail-above", "5"]) == 1
    assert main(["compare", str(new), str(old), "--fail-above", "5"]) == 0
    capsys.readouterr()
    assert main(["compare", str(old), str(new), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "distdiag.compare/1"
    assert found["runs"][1]["against_baseline"]["outcome"] == "slower"


def test_compare_needs_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, none = make_run(tmp_path / "few", steps=5), make_run(tmp_path / "none", steps=0)
    assert main(["compare", str(few), str(few), "--fail-above", "5"]) == 3
    assert "at least 20" in capsys.readouterr().out
    assert main(["compare", str(none), str(none)]) == 4


def test_nothing_that_appears_meanwhile_is_overwritten(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "missing")
    with pytest.raises(DistdiagError, match="is there already"), new_file(link):
        pass
    path = tmp_path / "report.html"
    with pytest.raises(DistdiagError, match="is there already"), new_file(path):
        path.write_text("another's")
    assert path.read_text() == "another's" and link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "report.html"]


def test_a_missing_directory_is_an_error(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "absent" / "x.html"
    assert main(["report", str(run), "-o", str(path), "--format", "json"]) == 2
    assert f"there is no directory {path.parent}\nhint: create it: mkdir -p" in capsys.readouterr().err
    assert not path.parent.exists()
