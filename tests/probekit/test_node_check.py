"""A probe as the check of a node: one line, and exit 1 only for a proved fault, whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distdiag.probekit.command import main, node_check
from tests.jobs import REPOSITORY, marked


def result(verdict: str, *reasons: str, probe: str = "allreduce") -> dict[str, object]:
    return {"schema": "distdiag.probe/1", "probe": probe, "verdict": verdict, "reasons": list(reasons)}


PASSED, FAILED = result("pass", "correct"), result("fail", "wrong values on rank 1", probe="broadcast")
NOISY = result("inconclusive", "others used 1.9 of 2 CPUs")


@pytest.mark.parametrize(
    ("output", "code", "line"),
    [
        (json.dumps(PASSED), 0, "ok: allreduce: correct"),
        (json.dumps(FAILED), 1, "fail: broadcast: wrong values on rank 1"),
        (json.dumps(result("fail") | {"probes": [NOISY, PASSED, FAILED]}), 1, "fail: broadcast: wrong values on rank 1"),
        (json.dumps(result("pass") | {"probes": [PASSED, PASSED]}), 0, "ok: 2 of 2 probes passed"),
        (json.dumps(NOISY), 3, "unknown: allreduce: others used 1.9 of 2 CPUs"),
        ('{"schema": "distdiag.probe/1", "error": {"kind": "missing_torch", "message": "a probe needs torch", "hint": "install it"}}', 2, "unknown: a probe needs torch (install it)"),
        ("", -11, "unknown: the probe ended with signal 11 and without a result"),
        ("Traceback", 1, "unknown: the probe ended with exit code 1 and without a result"),
        ("[]", 0, "unknown: "),
        ('{"verdict": "fail"}', 1, "unknown: "),
        ('{"verdict": "fail", "probe": "gpu\\u001b[2J\\n", "reasons": ["x"]}', 1, "fail: gpu\\x1b[2J : x"),
    ],
)  # fmt: skip
def test_only_a_proved_fault_drains_the_node(
    output: str, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_check, "_probed", lambda command, deadline_s: (output, code))
    assert node_check.run([], "all", "prolog", time.monotonic()) == (1 if line.startswith("fail") else 0)
    shown = capsys.readouterr()
    assert shown.out.startswith(f"[distdiag] {line}") and shown.out.count("\n") == 1 and shown.err == ""


@pytest.mark.parametrize(
    "arguments",
    [["--as", "prolog"], ["--as=healthcheck", "all", "--bugdet", "3"], ["nonsense", "--as", "prolog"], ["all", "--as=prolog", "--device", "cuda"], ["gpu", "--as", "healthcheck", "--help"]],
)  # fmt: skip
def test_wrong_options_and_a_missing_gpu_are_a_line_and_no_fault(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("[distdiag] unknown: ") and shown.out.count("\n") == 1 and shown.err == ""


def test_a_probe_that_hangs_is_killed_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.fork(); time.sleep(1000)"
    monkeypatch.setattr(node_check, "_command", lambda *_: [sys.executable, "-c", hangs, "hangs-for-the-test"])
    monkeypatch.setattr(node_check, "DEADLINE_S", 1.0)
    began = time.monotonic()
    assert node_check.run([], "all", "prolog", began) == 0 and time.monotonic() - began < 200
    assert "did not end within 1 s and was killed" in capsys.readouterr().out
    end = time.monotonic() + 10
    while (left := [c for c in _commands() if "hangs-for-the-test" in c]) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


def _commands() -> list[str]:
    return list(marked(os.environ["TEST_MARK"]).values())


@pytest.mark.parametrize("form", node_check.FORMS)
def test_it_runs_without_path_home_and_directory(form: str) -> None:
    """As slurmd starts it: an empty environment, and / as the working directory."""
    program = Path(sys.executable).with_name("distdiag")
    command = [sys.executable, "-m", "distdiag"] if not program.exists() else [str(program)]
    env = {} if program.exists() else {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, "probe", "barrier", "--as", form, "--budget", "4"],
        env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done
    word = done.stdout.removeprefix("[distdiag] ").partition(":")[0]
    assert word in ("ok", "unknown") and "barrier" in done.stdout and done.stdout.count("\n") == 1
