"""All that the commands print goes through `distdiag.streams`: text from a job cannot steer the terminal."""

from __future__ import annotations

import ast
import contextlib
import gzip
import json
import shutil
import sqlite3
import unicodedata
from pathlib import Path

import pytest

from distdiag.cli import main
from distdiag.page import directories
from distdiag.store.checked import schema
from distdiag.terms.untrusted import INVISIBLE
from tests.diagnosis.recordings import Job, as_json
from tests.jobs import REPOSITORY
from tests.monitor.test_damaged_pages import a_page
from tests.store.test_wrong_types import filled
from tests.traces.test_files import write_rank

HOSTILE = "a\x1b]0;title\x07\x9b2J\u202e\u2066\u200b\x7f\x08b"
# of the job's own output, of the package that trains, and of what serves the checkout
NOT_READERS = (
    "recorder/",
    "train/",
    "run.py",
    "launcher.py",
    "notebook.py",
    "doctor/torch_facts.py",
    "streams.py",
)


def test_no_command_prints_past_the_one_place() -> None:
    found = []
    for path in (REPOSITORY / "distdiag").rglob("*.py"):
        name = path.relative_to(REPOSITORY / "distdiag").as_posix()
        if name.startswith(NOT_READERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" or called.endswith(
                ("click.echo", "click.secho", "stdout.write", "stderr.write", "stdout.buffer.write")
            ):
                found.append(f"{name}:{node.lineno} {called}")  # type: ignore[attr-defined]
    assert not found


def invisible(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in INVISIBLE and c != "\n"}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with such text in every text column."""
    run = filled(tmp_path_factory.mktemp("hostile") / "run")
    con = sqlite3.connect(run / "run.db")
    for table, columns in schema().items():
        for column, (kind, _) in columns.items():
            with contextlib.suppress(sqlite3.Error):
                if kind == "TEXT" and column not in ("json", "ranks") and (table, column) != ("meta", "key"):
                    keep = " WHERE key NOT IN ('schema_version', 'world_size', 'checks')" if table == "meta" else ""
                    con.execute(f"UPDATE {table} SET {column} = {column} || ?{keep}", (HOSTILE,))
    for (text,) in con.execute("SELECT json FROM finding").fetchall():
        about = {**json.loads(text), "message": HOSTILE, "cost": HOSTILE, "advice": HOSTILE, "names": [HOSTILE]}
        con.execute("UPDATE finding SET json = ? WHERE json = ?", (json.dumps(about, ensure_ascii=False), text))
    con.commit()
    con.close()
    (run / "stacks").mkdir(exist_ok=True)
    shutil.copy(run / "run.db", run.parent / "copy.db")
    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ["diagnose"], ["diagnose", "--json"], ["diagnose", "--why", "deadlock"], ["compare"], ["compare", "--json"], ["tui", "--once"],
        ["tui", "--once", "--json"], ["report", "--format", "text", "-o", "-"], ["report", "--format", "json", "-o", "-"],
        *(["tui", "--once", "--screen", s] for s in ("comm", "heat", "memory", "findings", "data", "stacks", "probes", "timeline", "rank")),
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_control_character_of_a_run_reaches_the_terminal(
    hostile: Path, arguments: list[str], capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    code = main([*arguments, str(hostile), *([str(hostile)] if arguments[0] == "compare" else [])])
    out, err = (stream.decode() for stream in capfdbinary.readouterr())
    assert code in (0, 1, 3) and out.strip(), err
    assert not invisible(out) and not invisible(err)
    if "--json" in arguments or "json" in arguments:
        assert json.loads(out)["schema"].startswith("distdiag.")


def test_json_is_read_as_what_it_was(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", "--json", "--fail-on", "never", str(hostile)])
    assert json.loads(capsys.readouterr().out)["findings"][0]["message"] == HOSTILE


FORGED = f"{HOSTILE}\r\nhint: rm -r ~\n"  # a name that adds lines


@pytest.mark.parametrize(
    "arguments",
    [
        ["diagnose"], ["diagnose", "--json"], ["dump"], ["profile"], ["report"], ["compare", "."], ["tui", "--once"], ["doctor"],
        ["probe"], ["probe", "allreduce", "--inject"], ["probe", "allreduce", "--against"], ["probe", "step", "--params"],
        ["bench", "faults", "--replay"], ["report", "--format"], ["tui", "--once", "--screen"], [],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_error_about_a_hostile_name_has_two_lines(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (FORGED, FORGED * 300):
        assert main([*arguments, name]) in (2, 4)
        out, err = capsys.readouterr()
        assert not invisible(out) and not invisible(err)
        error, hint = err.splitlines()
        assert error.startswith("distdiag: error: ") and hint.startswith("hint: ") and not hint.startswith("hint: rm")


def test_dumps_logs_and_traces_escape_what_they_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = FORGED.replace("/", "")
    job = Job(2, {"1": (HOSTILE, (0, 1))})
    job.collective(group="1", op=HOSTILE)
    job.collective(ranks=(0,))
    for kind in ("log", "dumps", "traces"):
        (tmp_path / kind).mkdir()
    (tmp_path / "log" / f"{name}.log").write_text(
        f"[rank1]: ValueError: {HOSTILE}\nRuntimeError: CUDA error: {HOSTILE}\n"
    )
    for rank in range(2):
        (tmp_path / "dumps" / f"{name}rank{rank}").write_bytes(as_json(job.dump(rank)))
        path = write_rank(tmp_path / "traces", rank, late_us=300.0 * rank, name=f"{name}rank{rank}.json")
        text = gzip.decompress(path.read_bytes()).decode()
        path.write_text(text.replace('"aten::mm"', json.dumps(FORGED)).replace('"0"', json.dumps(FORGED)))
    (tmp_path / "traces" / f"{name}.json").write_text('{"traceEvents": [{"ph": "\x9b2J"')
    for kind in ("log", "dumps", "traces"):
        for more in ([], ["--json"]):
            assert main(["diagnose", str(tmp_path / kind), *more]) in (0, 1, 3)
            out, err = capsys.readouterr()
            assert len(out) > 100 and not invisible(out) and not invisible(err)
            assert not any(line.startswith("hint: rm") for line in out.splitlines())


def test_dump_and_profile_escape_what_pages_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also names of 9 KB, which a terminal would show as a screen of one name."""
    directories.make(pages := directories.overflow(tmp_path, 0))
    directories.node_record(tmp_path, 0).write_text(f"h:1:1 {pages}\n")
    held = []
    for rank, name in enumerate((FORGED, FORGED * 250)):
        held.append(page := a_page(pages, rank))
        page.header.stack[0] = page.site(f"/job/{name.replace('/', '')}.py", 7, name)
        page.page.groups[0].description = page.header.raw_innermost = page.text(name)
    for arguments in (
        ["dump", "--timeout", "0.2"],
        ["dump", "--timeout", "0.2", "--json"],
        ["profile", "--timeout", "0.2"],
    ):
        assert main([*arguments, str(tmp_path)]) == 5
        out, err = capsys.readouterr()
        assert not invisible(out) and not invisible(err)
        lines = [*out.splitlines(), *err.splitlines()]
        assert not any(line.startswith("hint: rm") for line in lines)
        assert "--json" in arguments or max(map(len, lines)) < 2000
