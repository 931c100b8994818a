"""action.yml: valid, pinned, no input inside a script, and every script run as GitHub runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import REPOSITORY, clean_env
from tests.report.runs import DEADLOCK, make_run

FILE = REPOSITORY / "action.yml"
EXPRESSION = re.compile(r"\$\{\{ ([a-z]+(?:\.[a-z-]+)+) \}\}")


def parsed(text: str) -> Any:
    """Read the part of YAML that the file is written in; whatever else is in it fails, so that any reader of YAML reads the same.

    Blocks of mappings and lists, plain and quoted scalars, `|` texts, comments of whole lines and after a pinned action.
    """
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1)]
    rest = [(n, line) for n, line in lines if not line.startswith("#")]
    value, left = _block(rest, 0)
    assert left == [], f"line {left[0][0]} is not indented as its block"
    return value


def _block(lines: list[tuple[int, str]], indent: int) -> tuple[Any, list[tuple[int, str]]]:
    found: Any = None
    while lines:
        number, line = lines[0]
        assert line.strip() and "\t" not in line and line == line.rstrip(), f"line {number}"
        depth = len(line) - len(line.lstrip(" "))
        if depth < indent:
            break
        assert depth == indent, f"line {number}: indented by {depth}, not {indent}"
        if line.lstrip().startswith("- "):
            found = [] if found is None else found
            assert isinstance(found, list), f"line {number}: a list in a mapping"
            item, lines = _block([(number, f"{' ' * (indent + 2)}{line[indent + 2 :]}"), *lines[1:]], indent + 2)
            found.append(item)
            continue
        key = re.fullmatch(r"([\w-]+):(?: (.*))?", line[indent:])
        assert key is not None, f"line {number}: neither key nor item: {line}"
        found = {} if found is None else found
        assert isinstance(found, dict) and key[1] not in found, f"line {number}: {key[1]} again, or in a list"
        lines = lines[1:]
        if key[2] is None:
            found[key[1]], lines = _block(lines, indent + 2)
        elif key[2] == "|":
            body = []
            while lines and lines[0][1].startswith(" " * (indent + 2)):
                body.append(lines.pop(0)[1][indent + 2 :])
            found[key[1]] = "\n".join(body) + "\n"
        else:
            found[key[1]] = _scalar(key[2], number)
    return found, lines


def _scalar(text: str, number: int) -> str:
    if text.startswith('"'):
        return json.loads(text)
    text = re.sub(r" # v[\d.]+$", "", text)
    assert not re.search(r"^[\[\]{}>&*!%@`'|?,#-]|: | #|:$", text), f"line {number}: quote it"
    assert text not in ("true", "false", "null", "yes", "no", "on", "off") and not re.fullmatch(r"[\d.]+", text)
    return text


ACTION = parsed(FILE.read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]


def test_it_is_a_composite_action_and_yaml() -> None:
    assert {"name", "description", "inputs", "outputs", "runs"} <= set(ACTION) and ACTION["runs"][
        "using"
    ] == "composite"
    assert all({"description", "default"} <= set(given) for given in ACTION["inputs"].values())
    assert all("uses" in step or step.get("shell") == "bash" for step in STEPS)
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return  # then the strict reader above decides alone
    assert yaml.safe_load(FILE.read_text()) == ACTION


def test_no_text_of_a_user_is_inside_a_script() -> None:
    for step in STEPS:
        assert "${{" not in step.get("run", "")
        for value in (*step.get("env", {}).values(), *step.get("with", {}).values()):
            assert "${{" not in EXPRESSION.sub("", value)
    named = set(EXPRESSION.findall(FILE.read_text()))
    outputs = {f"steps.verdict.outputs.{name}" for name in re.findall(r'echo "([\w-]+)=', FILE.read_text())}
    assert named <= {*(f"inputs.{name}" for name in ACTION["inputs"]), *outputs}
    assert {f"inputs.{name}" for name in ACTION["inputs"]} <= named


def test_actions_that_it_uses_are_pinned_by_commit() -> None:
    used = [line.strip() for line in FILE.read_text().splitlines() if "uses:" in line]
    assert used and all(re.fullmatch(r"uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+", line) for line in used)


def run_step(
    step: dict[str, Any], runner: Path, inputs: dict[str, str], more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one script as GitHub does: its variables filled in, `bash -eo pipefail`, in the checkout's directory."""
    given = {name: about["default"] for name, about in ACTION["inputs"].items()} | inputs
    outputs = dict(line.split("=", 1) for line in (runner / "output").read_text().splitlines())
    known = {f"inputs.{k}": v for k, v in given.items()} | {f"steps.verdict.outputs.{k}": v for k, v in outputs.items()}
    variables = {k: EXPRESSION.sub(lambda m: known.get(m[1], ""), v) for k, v in step.get("env", {}).items()}
    script = runner / "script.sh"
    script.write_text(step["run"])
    env = clean_env(runner / "home") | variables | (more or {})
    env |= {"RUNNER_TEMP": str(runner), "GITHUB_OUTPUT": str(runner / "output")}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)], cwd=runner / "work", env=env,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=170,
    )  # fmt: skip


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    """A runner with an empty checkout, and distdiag where the first step installs it."""
    (tmp_path / "work" / ".git").mkdir(parents=True)
    (tmp_path / "output").touch()
    command = tmp_path / "distdiag" / "bin" / "distdiag"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m distdiag "$@"\n')
    command.chmod(0o755)
    return tmp_path


INSTALL, DIAGNOSE, FAIL = (
    next(s for s in STEPS if s["name"] == n) for n in ("Install distdiag", "Diagnose", "Fail by the verdict")
)


@pytest.mark.parametrize(("fail_on", "code"), [("error", 1), ("never", 0)])
def test_a_finding_is_an_annotation_and_the_exit_code(runner: Path, fail_on: str, code: int) -> None:
    make_run(runner / "work" / "my run", findings=(DEADLOCK,))
    inputs = {"targets": "\nmy run\n\n", "fail-on": fail_on, "sarif": "true"}
    done = run_step(DIAGNOSE, runner, inputs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("::error title=distdiag deadlock/missing_rank::rank 1")
    log = json.loads((runner / "distdiag.sarif").read_text())
    assert log["runs"][0]["results"][0]["ruleId"] == "deadlock/missing_rank"
    assert (runner / "output").read_text() == f"exit-code={code}\nsarif={runner}/distdiag.sarif\n"
    assert run_step(FAIL, runner, inputs).returncode == code


@pytest.mark.parametrize(
    "targets",
    ["$(touch pwned)", "`touch pwned`", "x; touch pwned", '"; touch pwned; "', "--help", "--fail-on=never", "-"],
)
def test_a_hostile_input_is_a_path_that_does_not_exist(runner: Path, targets: str) -> None:
    inputs = {"targets": targets, "fail-on": "error", "sarif": "true"}
    done = run_step(DIAGNOSE, runner, inputs)
    assert done.returncode == 0 and done.stderr.startswith("distdiag: error: "), done
    assert (runner / "output").read_text() in ("exit-code=4\n", "exit-code=2\n")
    assert run_step(FAIL, runner, inputs).returncode in (2, 4)
    assert not (runner / "work" / "pwned").exists()
    assert run_step(DIAGNOSE, runner, {"fail-on": "$(touch pwned)"}).returncode == 0
    assert not (runner / "work" / "pwned").exists()


def test_the_first_step_installs_the_action_s_own_distdiag(runner: Path) -> None:
    """Without a network: the build's and the package's requirements are those of this environment."""
    checkout = runner / "action"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "distdiag", "probes", "man"], cwd=REPOSITORY, capture_output=True, text=True, check=True)  # fmt: skip
    for name in [
        *listed.stdout.split(),
        "_distdiag_autoload.py",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
    ]:
        if (REPOSITORY / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_bytes((REPOSITORY / name).read_bytes())
    offline = {
        "GITHUB_ACTION_PATH": str(checkout), "PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull, "PIP_IGNORE_INSTALLED": "1",
    }  # fmt: skip
    (runner / "distdiag" / "bin" / "distdiag").unlink()
    done = run_step(INSTALL, runner, {"python": sys.executable}, offline)
    assert done.returncode == 0, done.stdout + done.stderr
    installed = subprocess.run(
        [runner / "distdiag/bin/distdiag", "--version"], env=clean_env(runner / "home", {"PYTHONPATH": offline["PYTHONPATH"]}),
        cwd=runner, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    assert list((runner / "distdiag" / "lib").glob("python3*/site-packages/distdiag/cli/__init__.py"))
    assert (runner / "distdiag" / "share" / "man" / "man1" / "distdiag.1").exists()
