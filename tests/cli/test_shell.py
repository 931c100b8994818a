"""What the shell and people around us get: completion, the man page, the version, the page for assistants."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import distdiag
from distdiag.assistant import skill
from distdiag.cli import COMMANDS, main
from distdiag.diagnosis.kinds import KINDS
from distdiag.errors import ExitCode
from distdiag.version import VERSION
from tests.jobs import REPOSITORY, clean_env
from tests.test_documents import calls, command_lines, wrong


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_clicks_own(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_DISTDIAG_COMPLETE={shell}_complete" in script and "\\x" not in script
    if shutil.which(shell):
        flags = ["--no-execute"] if shell == "fish" else ["-n"]
        subprocess.run([shell, *flags], input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("distdiag diag", "diagnose"), ("distdiag diagnose --fail-on w", "warning"), ("distdiag tui --onc", "--once")],
)
def test_bash_completes_commands_options_and_values(tmp_path: Path, words: str, expected: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "distdiag"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=clean_env(tmp_path, {"_DISTDIAG_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}),
    )  # fmt: skip
    assert answer.stdout.splitlines() == [f"plain,{expected}"], answer.stderr


def test_no_such_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in error and hint.startswith("hint: ")


def test_the_version_is_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert "version" in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dynamic"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"distdiag, version {VERSION}\n"
    assert distdiag.__version__ == VERSION
    quoted = re.compile(rf"""["']{re.escape(VERSION)}["']""")
    assert [p for p in (REPOSITORY / "distdiag").rglob("*.py") if quoted.search(p.read_text())] == [
        REPOSITORY / "distdiag" / "version.py"
    ]


def test_the_man_page_is_current_and_renders() -> None:
    path = REPOSITORY / "man" / "distdiag.1"
    tool = REPOSITORY / "tools" / "man_page.py"
    made = subprocess.run(
        [sys.executable, tool, "-"], capture_output=True, text=True, timeout=60, check=True, cwd=REPOSITORY
    )
    assert path.read_text() == made.stdout, "run `python tools/man_page.py`"
    assert made.stdout.isascii()
    if shutil.which("groff"):
        shown = subprocess.run(
            ["groff", "-man", "-Tascii", "-ww", path], capture_output=True, text=True, timeout=60, check=True
        )
        assert shown.stderr == ""
        text = re.sub(r"\x1b\[\d*m|.\x08", "", shown.stdout)
        for name in COMMANDS:
            assert re.search(rf"^ +distdiag {name}\b", text, re.MULTILINE), name
        for code in ExitCode:
            assert re.search(rf"^ +{code.value} +{code.name}$", text, re.MULTILINE), code


def test_every_command_of_the_page_for_assistants_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["skill"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("---\nname: distdiag\ndescription: ") and len(page) < 6000
    found = [call for line in command_lines(page) for call in calls(line)]
    assert len(found) >= len(skill.COMMANDS) and [wrong(*call) for call in found if wrong(*call)] == []
    for word in (*KINDS, *(f"- {code.value}: " for code in ExitCode)):
        assert word in page
    named = set(re.findall(r"`(\w+)`", page.partition("## The object")[2].partition("## What")[0]))
    keys = {*re.findall(r'"(\w+)": \{', (REPOSITORY / "docs/schemas/findings-1.json").read_text())}
    states = {"waiting", "running", "stalled", "deadlocked", "degraded", "ended", "failed"}
    assert named - keys - states == {"proved", "suspected", "null"}, "a key that the JSON does not have"
