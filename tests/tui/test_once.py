"""`distdiag tui`: `--once` on a terminal and in a pipe, `--json`, errors of one line and a hint."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distdiag.cli import main
from distdiag.store import rundir
from tests.tui.conftest import MakeRun
from tests.tui.synthetic import Scenario, make


def always(runs: MakeRun, sc: Scenario) -> Path:
    """A run whose monitor counts as alive whatever the time is."""
    return runs(sc, "always")


PLAIN = {
    k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "DISTDIAG_RUN_DIR")
}
ENV = {**PLAIN, "TERM": "xterm-256color", "PYTHONUTF8": "1", "LANG": "C.UTF-8"}


def tui(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command with its output in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "distdiag", "tui", *map(str, arguments)], capture_output=True, env={**ENV, **(env or {})},
        cwd=cwd, encoding="utf-8", timeout=60,
    )  # fmt: skip


def tui_on_terminal(*arguments: object, size: tuple[int, int] = (80, 24), env: dict[str, str] | None = None) -> str:
    """Return the command's output on a terminal of this size."""
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "distdiag", "tui", *map(str, arguments)], stdout=slave, stderr=slave, stdin=slave,
        env={**ENV, **(env or {})}, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    out, end = b"", time.monotonic() + 60
    try:
        while time.monotonic() < end:
            ready, _, _ = select.select([master], [], [], 0.2)
            try:
                chunk = os.read(master, 65536) if ready else b""
            except OSError:  # the terminal closes with its last writer
                break
            out += chunk
            if not chunk and process.poll() is not None:
                break
        else:
            raise AssertionError(f"still running; it printed {out.decode()!r}")
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return out.decode().replace("\r\n", "\n")


def test_on_a_terminal_it_fits_and_leaves_a_line_for_the_prompt(runs: MakeRun) -> None:
    run = always(runs, Scenario(state="deadlocked", ranks=8))
    out = tui_on_terminal(run, "--once")
    assert "\x1b[31;1m" in out or "\x1b[31m" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "\x1b" not in plain  # colours only: no cursor movement, no clearing
    lines = plain.splitlines()
    assert len(lines) == 23 and max(map(len, lines)) <= 80
    assert "DEADLOCK" in lines[0] and any("train.py:118 in next_batch" in x for x in lines)
    assert not any("q Quit" in x for x in lines)
    without = tui_on_terminal(run, "--once", env={"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", without) and "\x1b[1m" in without
    assert re.sub(r"\x1b\[[0-9;]*m", "", without) == plain


def test_in_a_pipe_it_is_plain_text_with_every_rank(runs: MakeRun) -> None:
    result = tui(always(runs, Scenario(ranks=67)), "--once")
    assert result.returncode == 0 and result.stderr == ""
    assert "\x1b" not in result.stdout
    assert all(re.search(rf"^ \S +{r} node", result.stdout, re.MULTILINE) for r in range(67))
    assert "\n\n\n" not in result.stdout
    narrow = tui(always(runs, Scenario(ranks=67)), "--once", env={"COLUMNS": "72"})
    assert max(map(len, narrow.stdout.splitlines())) <= 72
    forced = tui(always(runs, Scenario(ranks=67)), "--once", env={"FORCE_COLOR": "1"})
    assert "\x1b[" in forced.stdout


@pytest.mark.parametrize(
    "screen", ["comm", "heat", "memory", "findings", "data", "stacks", "probes", "timeline", "profile", "rank", "help"]
)
def test_every_screen_can_be_printed(runs: MakeRun, screen: str) -> None:
    result = tui(always(runs, Scenario(state="deadlocked", ranks=8)), "--once", "--screen", screen, "--size", "100x30")
    assert result.returncode == 0 and f"> {'mem/gpu' if screen == 'memory' else screen}" in result.stdout
    assert not re.search(r"press \d", result.stdout), "nobody can press a key"


def test_options_reach_the_screen(runs: MakeRun) -> None:
    run = always(runs, Scenario(ranks=67))
    text = tui(run, "--once", "--filter", "rank 3-5", "--sort", "self_ms", "--size", "90x24").stdout
    assert "3 of 67 ranks pass" in text and "sort: self ms" in text
    assert "rank 5 " in tui(run, "--once", "--rank", "5").stdout.splitlines()[0]
    assert tui(run, "--once", "--ascii").stdout.isascii()
    assert tui(
        run,
        "--once",
        env={"PYTHONUTF8": "0", "LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    ).stdout.isascii()
    assert "REPLAY" in tui(run, "--once", "--at", "268").stdout or "PAUSED" in tui(run, "--once", "--at", "268").stdout


def test_a_rank_that_the_run_lacks_is_an_error(runs: MakeRun) -> None:
    result = tui(always(runs, Scenario(ranks=8)), "--once", "--rank", "8")
    error, hint = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    assert error == "distdiag: error: rank 8 is not part of this run, which has ranks 0–7"
    assert hint.startswith("hint: ") and "--once" in hint


def test_json_is_one_object_with_its_schema_first(runs: MakeRun) -> None:
    result = tui(always(runs, Scenario(state="deadlocked", ranks=8)), "--once", "--json")
    body = json.loads(result.stdout)
    assert result.returncode == 0 and next(iter(body)) == "schema" and body["schema"] == "distdiag.snapshot/1"
    assert body["state"] == "deadlocked" and body["world_size"] == 8 and body["step"] == 1203
    assert body["waiting"] == [{"op": "all_reduce", "group": "default_pg", "seq": 5404, "bytes": 26214400, "ranks": 7}]
    assert body["ranks"][5]["line"] == 118 and body["ranks"][5]["waiting_op"] is None
    assert body["findings"][0]["kind"] == "deadlock" and body["next_command"].startswith("distdiag dump ")
    assert body["samples_per_s"] is not None and body["self_ms"]["p99"] is None  # not of eight ranks


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere", "--once"], 4, ("no run directory nowhere", "torchrun")),
        (["--once"], 4, ("reports/latest does not exist", "torchrun")),
        (["RUN"], 2, ("needs a terminal", "--once")),
        (["RUN", "--json"], 2, ("--json needs --once", "--once --json")),
        (["RUN", "--once", "--filter", "sev>=bad"], 2, ("sev>=bad", "for example")),
        (["RUN", "--once", "--sort", "colour"], 2, ("unknown sort order", "severity")),
        (["RUN", "--once", "--size", "20"], 2, ("not WIDTHxHEIGHT", "120x30")),
        (["RUN", "--once", "--size", "20x5"], 2, ("too small", "60x10")),
        (["RUN", "--once", "--screen", "x"], 2, ("x", "--help")),
        (["RUN", "--hz", "0"], 2, ("hz", "--help")),
    ],
)
def test_errors_are_one_line_and_a_hint(
    runs: MakeRun, tmp_path: Path, arguments: list[str], code: int, words: tuple[str, str]
) -> None:
    run = always(runs, Scenario(ranks=8))
    result = tui(*(run if a == "RUN" else a for a in arguments), cwd=tmp_path)
    assert result.returncode == code
    assert ("--json" in arguments) == bool(result.stdout)
    error, hint = result.stderr.splitlines()
    assert error.startswith("distdiag: error: ") and words[0] in error
    assert hint.startswith("hint: ") and words[1] in hint


def test_a_run_that_cannot_be_read_exits_with_its_code(runs: MakeRun, tmp_path: Path) -> None:
    empty = tmp_path / "starting"
    empty.mkdir()
    (empty / "run.json").write_text("{}")
    result = tui(empty, "--once")
    assert result.returncode == 4 and "WAITING" in result.stdout
    body = json.loads(tui(empty, "--once", "--json").stdout)
    assert body["error"]["kind"] == "run_missing" and set(body["error"]) == {"kind", "message", "hint"}
    assert body["schema"] == "distdiag.snapshot/1"
    missing = tui(tmp_path / "none", "--once", "--json")
    assert missing.returncode == 4 and json.loads(missing.stdout)["error"]["kind"] == "no_run"
    damaged = tmp_path / "damaged"
    shutil.copytree(always(runs, Scenario(ranks=8)), damaged)
    (damaged / "run.db").write_bytes(b"x" * 5000)
    result = tui(damaged, "--once")
    assert result.returncode == 2 and "DAMAGED" in result.stdout and "Traceback" not in result.stderr


def test_a_launch_that_is_newer_than_the_run_shown_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, the screen of the run before passes for the job that was just started."""
    monkeypatch.chdir(tmp_path)
    run = make(tmp_path / "reports" / "20250101-120000-train", Scenario(ranks=2, state="ended"), "ended")
    rundir.mark_latest(run)
    (tmp_path / "reports" / "20250102-120000-train_slow").mkdir()
    note = "note: a newer launch (train_slow) has not reported yet"
    assert main(["tui", "--once"]) == 0 and note in capsys.readouterr().err
    shown: list[str] = []
    monkeypatch.setattr("distdiag.cli.tui._watch", lambda path, ui, *options, **more: shown.append(ui.message) or 0)
    assert main(["tui"]) == 0 and shown == [note]
    assert main(["tui", "--once", str(run)]) == 0 and note not in capsys.readouterr().err


def test_printing_needs_no_terminal_library(runs: MakeRun) -> None:
    run = always(runs, Scenario(ranks=8))
    code = (
        "import sys\nfrom distdiag.cli import main\n"
        f"main(['tui', {str(run)!r}, '--once', '--size', '80x24'])\n"
        "print(sorted({'torch', 'pandas', 'numpy', 'textual', 'aiohttp'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=ENV, check=True)
    assert out.stdout.splitlines()[-1] == "[]"
