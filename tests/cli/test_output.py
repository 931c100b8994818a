"""All that the commands print goes through `distdiag.streams`: text from a job cannot steer the terminal."""

from __future__ import annotations

import ast
import contextlib
import json
import shutil
import sqlite3
import unicodedata
from pathlib import Path

import pytest

from distdiag.cli import main
from distdiag.store.checked import schema
from distdiag.terms.untrusted import INVISIBLE
from tests.jobs import REPOSITORY
from tests.store.test_wrong_types import filled

HOSTILE = "a\x1b]0;title\x07\x9b2J\u202e\u2066\u200b\x7f\x08b"
# of the job's own output, of the package that trains, and of what serves the checkout
NOT_READERS = (
    "recorder/",
    "train/",
    "run.py",
    "launcher.py",
    "cli/bench.py",
    "cli/_",
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


def test_errors_escape_what_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"]):
        assert main(["diagnose", f"/nowhere/{HOSTILE}", *more]) == 4
        assert not any(map(invisible, capsys.readouterr()))


def test_dumps_logs_and_traces_escape_what_they_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = HOSTILE.replace("/", "")
    (tmp_path / f"{name}.log").write_text(f"[rank1]: ValueError: {HOSTILE}\nRuntimeError: CUDA error: {HOSTILE}\n")
    for more in ([], ["--json"]):
        assert main(["diagnose", str(tmp_path), *more]) in (0, 1, 3)
        assert not any(map(invisible, capsys.readouterr()))
