"""Bad input: one line of error, one line of hint, the contract's exit code, no traceback; and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from distdiag.cli import COMMANDS, main
from distdiag.errors import PACKAGES, DistdiagError, ExitCode, need
from distdiag.store.reader import open_run
from tests.jobs import REPOSITORY, clean_env, distdiag
from tests.report.runs import make_run

TAPE = REPOSITORY / "tests" / "faults" / "tapes" / "gloo" / "ckpt_parts.tape"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("args", "code", "error", "hint"),
    [
        (["repot"], 2, "unknown command 'repot'", "did you mean `distdiag report`?"),
        (["xyzzy"], 2, "unknown command 'xyzzy'", "`distdiag --help` lists the commands"),
        (["--frobnicate"], 2, "No such option", "`distdiag --help` lists the options"),
        (
            ["doctor", "--ranks", "zero"],
            2,
            "'zero' is not a valid whole number",
            "`distdiag doctor --help` lists the options",
        ),
        (["doctor", "surplus"], 2, "Got unexpected extra argument (surplus)", "`distdiag doctor --help`"),
        (["report"], 4, "no run here: reports/latest does not exist", "`DISTDIAG=1 torchrun"),
        (["diagnose"], 4, "no run", "`DISTDIAG=1 torchrun"),
        (["tui"], 4, "no run", "`DISTDIAG=1 torchrun"),
        (["tui", "--once"], 4, "no run", "`DISTDIAG=1 torchrun"),
        (["dump"], 4, "no run", "`DISTDIAG=1 torchrun"),
        (["report", "absent"], 4, "no run directory absent", "`DISTDIAG=1 torchrun"),
        (["report", __file__], 2, "is a file, not a run directory", "`distdiag diagnose"),
        (["diagnose", "absent"], 4, "absent", ""),
        (["diagnose", str(TAPE)], 2, "ckpt_parts.tape is a tape", f"`distdiag bench faults --replay {TAPE}`"),
        (["probe", "allredcue"], 2, "allredcue", "allreduce"),
        (["completion"], 2, "Choose from: bash, zsh, fish", "`distdiag completion --help`"),
        (["completion", "tcsh"], 2, "'tcsh' is not one of", "`distdiag completion --help`"),
        (["mcp", "a", "b"], 2, "unexpected extra argument (b)", "`distdiag mcp --help`"),
        (["config", "surplus"], 2, "unexpected extra argument (surplus)", "`distdiag config --help`"),
        (["run", "--nproc", "2", "fit.py"], 2, "no option --nproc", "did you mean --nproc-per-node?"),
        (["run", "--qiuet", "fit.py"], 2, "no option --qiuet", "did you mean --quiet?"),
        (["run", "--new_in-torch", "2", "fit.py"], 2, "no script fit.py", "a Python file"),
        (["run", "."], 2, ". is a directory without __main__.py", "a Python file"),
        (["run", "-m"], 2, "-m needs the name of a module", "distdiag run"),
        (["run", "--nproc_per-node=0", "fit.py"], 2, "--nproc_per-node 0: no rank", "give 1 or more"),
        (["attach", "abc"], 2, "'abc' is not a valid whole number", "`distdiag attach --help`"),
        (["tui", "--once", "--at", "-5"], 2, "-5.0 is not in the range", "`distdiag tui --help`"),
        (["tui", "--once", "--theme", "nope"], 2, "--theme is for the live view", "leave it out"),
        (["probe", "allreduce", "--ranks", "2"], 2, "--ranks compares strategies", "--nproc 2"),
        (["attach", "--job"], 2, "'--job' requires an argument", "`distdiag attach --help`"),
        (["history", __file__], 2, "is a file, not a directory with runs", "Parquet"),
        (["probe", "allreduce", "--against", "/dev/zero"], 2, "no baseline /dev/zero: not a regular file", "--save"),
        (["skill", "surplus"], 2, "unexpected extra argument (surplus)", "`distdiag skill --help`"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_an_error_is_one_line_plus_one_hint(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, error: str, hint: str
) -> None:
    assert main(args) == code
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert len(lines) == 2, output.err
    assert lines[0].startswith("distdiag: error: ") and error in lines[0]
    assert lines[1].startswith("hint: ") and hint in lines[1]


@pytest.mark.parametrize(
    ("args", "module", "package"),
    [
        (["tui"], "textual", "textual"),
        (["tui", "--web"], "textual_serve", "textual-serve"),
        (["report"], "jinja2", "jinja2"),
        (["report"], "matplotlib", "matplotlib"),
        (["mcp"], "mcp", "mcp"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_a_missing_package_is_named_with_its_install_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    module: str,
    package: str,
) -> None:
    make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, module, None)  # simulates a missing package
    assert main([*args, str(tmp_path / "run")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    error, hint = output.err.splitlines()
    assert error.endswith(f"needs {module}, which is not installed")
    assert hint == f"hint: pip install {package}"


def test_a_frame_without_pandas_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with open_run(tmp_path / "run") as run, pytest.raises(DistdiagError, match="needs pandas") as raised:
        run.steps_frame()
    assert raised.value.hint == "pip install pandas"


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jinja2", "opentelemetry"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DistdiagError, match=r"x needs jinja2 and opentelemetry, which are not installed$") as raised:
        need(("jinja2", "click", "opentelemetry"), "x")
    assert raised.value.hint == "pip install jinja2 opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"


def test_packages_that_hints_name_are_those_of_the_extras() -> None:
    """distdiag is on no package index: no hint may name it, or a package that no extra has."""
    sources = "".join(path.read_text() for path in (REPOSITORY / "distdiag").rglob("*.py"))
    asked = {name for group in re.findall(r"\bneed\(\((.*?),?\), ", sources) for name in re.findall(r'"(\w+)"', group)}
    named = {package for name in asked for package in PACKAGES.get(name, name).split()}
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert len(asked) > 7 and named <= {re.split("[>=[]", entry)[0] for entries in extras.values() for entry in entries}
    assert re.findall(r"pip install[^\n]*distdiag", sources) == []


@pytest.mark.parametrize("name", ["diagnose", "tui", "compare", "doctor", "probe", "dump"])
def test_errors_are_objects_with_json(capsys: pytest.CaptureFixture[str], name: str) -> None:
    args = {
        "diagnose": ["absent"], "tui": ["--once", "absent"], "compare": ["a", "b"], "doctor": ["--reach", "x"],
        "probe": ["allredcue"], "dump": ["absent"],
    }[name]  # fmt: skip
    code = main([name, *args, "--json"])
    output = json.loads(capsys.readouterr().out)
    assert code in (2, 4)
    assert next(iter(output)) == "schema" and output["schema"].startswith("distdiag.")
    assert set(output["error"]) == {"kind", "message", "hint"}


def test_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for code in ExitCode:
        assert f"{code.value} {code.name}" in output
    for name in COMMANDS:
        assert f" {name} " in output


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([name, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.lower().startswith(f"usage: distdiag {name}")
    if name in ("diagnose", "report", "compare", "doctor", "probe"):
        assert "exit code" in output.lower(), "the help of a command that judges must explain its exit codes"


@pytest.mark.parametrize("how", ["--ascii", "a terminal that knows no more"])
def test_output_is_ascii_if_the_terminal_encoding_is(how: str, tmp_path: Path) -> None:
    env = clean_env(tmp_path / "home") | ({} if how == "--ascii" else {"PYTHONIOENCODING": "ascii"})
    command = [sys.executable, "-m", "distdiag", "doctor", "--no-torch", *(["--ascii"] if how == "--ascii" else [])]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert ended.stdout.isascii() and len(ended.stdout) > 200 and b"Traceback" not in ended.stderr
    plain = distdiag("doctor", "--no-torch").stdout
    assert not plain.isascii(), "else this shows nothing"


@pytest.mark.parametrize(
    "command", [["-m", "distdiag", "run"], ["-m", "distdiag.run"], ["-m", "distdiag.train", "--monitor"]]
)
def test_an_invalid_keep_size_is_refused(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("pass")
    target = [] if "distdiag.train" in command else ["x.py"]
    ended = subprocess.run(
        [sys.executable, *command, "--keep", "little", *target],
        cwd=tmp_path,
        env=clean_env(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "--keep little is no size" in ended.stderr and "--keep 500M" in ended.stderr


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    ended = subprocess.run(
        f"{sys.executable} -m distdiag doctor --no-torch | true",
        shell=True,
        cwd=tmp_path,
        env=clean_env(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr == ""


@pytest.mark.parametrize(
    "arguments", ["skill", "--help", "skill | head -c 0; true", "diagnose absent --json", "completion bash"]
)
def test_a_full_disk_below_the_output_is_one_error(arguments: str, tmp_path: Path) -> None:
    arguments, _, after = arguments.partition(" | ")
    ended = subprocess.run(
        f"{sys.executable} -m distdiag {arguments} {f'| {after}' if after else '> /dev/full'}",
        shell=True,
        cwd=tmp_path,
        env=clean_env(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    error = "distdiag: error: the output cannot be written: No space left on device"
    assert ended.returncode == 2 * (not after) and ended.stdout == ""
    assert [line for line in ended.stderr.splitlines() if line.startswith("distdiag:")][-1:] == (
        [] if after else [error]
    )
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


def test_a_command_without_standard_streams_reads_and_prints_as_with_them(tmp_path: Path) -> None:
    """As cron and daemons start it: a file must not get the number of a stream, nor an error go to stdout."""
    (tmp_path / "job.log").write_text("[rank1]: ValueError: x\n")

    def run(arguments: str) -> tuple[int, str]:
        ended = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m distdiag {arguments}"],
            cwd=tmp_path,
            env=clean_env(tmp_path / "home"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=60,
            check=False,
        )
        return ended.returncode, ended.stdout

    with_them = run("diagnose job.log")
    assert with_them[0] in (1, 3) and run("diagnose job.log 0<&- 2>&-") == with_them
    assert run("diagnose job.log 0<&- 1>&- 2>&-") == (with_them[0], "")
    assert run("diagnose absent 2>&-") == (4, "")


def test_interrupted_by_the_keyboard(tmp_path: Path) -> None:
    # the doctor resolves the host name; Ctrl-C arrives while it waits for the answer
    code = (
        "import os, signal, socket, distdiag.cli\n"
        "socket.getaddrinfo = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT) or []\n"
        "raise SystemExit(distdiag.cli.main(['doctor', '--no-torch']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=clean_env(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == ExitCode.INTERRUPTED, ended.stderr
    assert "Traceback" not in ended.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_version() -> None:
    answer = distdiag("--version")
    assert answer.returncode == 0 and answer.stdout.startswith("distdiag, version ")
