"""`--as prolog` and `--as healthcheck`: a probe as a check of a node, for Slurm and Kubernetes.

A node is drained only for a proved fault. Whatever else happens (a busy host, no torch, no GPU, a wrong option, too little time, a
crash of the probe) the exit code is 0, and the line gives the reason. The probe runs in a separate process, which is killed at a
deadline: a driver that hangs must not hang slurmd.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from distdiag.errors import ExitCode
from distdiag.streams import say
from distdiag.terms.launchers import RANKS
from distdiag.terms.untrusted import cut, visible

FORMS = {"prolog": 40.0, "healthcheck": 20.0}  # seconds of measuring
DEADLINE_S = 55.0  # from the start of this process; slurmd kills a HealthCheckProgram after 60 s
LINE = 300  # characters


def split_form(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of `--as` in a command line, None without one, and the other words."""
    form, others, words = None, [], iter(arguments)
    for word in words:
        if word == "--as":
            form = next(words, None)
        elif word.startswith("--as="):
            form = word.removeprefix("--as=")
        else:
            others.append(word)
    return form, others


def run(words: Sequence[str], name: str | None, form: str, started_s: float) -> int:
    """Run the probe, print one line, and return FAILED for a proved fault, else OK.

    `words` are those of the probe command without `--as`; `started_s`: time.monotonic() at which this process began.
    """
    try:
        word, why = _judged(*_probed(_command(words, name, form), started_s + DEADLINE_S))
    except Exception as e:
        word, why = "unknown", f"{type(e).__name__}: {e}"
    say(cut(visible(" ".join(f"[distdiag] {word}: {why}".split())), LINE))
    return int(ExitCode.FAILED if word == "fail" else ExitCode.OK)


def _command(words: Sequence[str], name: str | None, form: str) -> list[str]:
    """Return the command line that measures, and prints one object."""
    budget = [] if any(w.split("=")[0] in ("--budget", "--quick") for w in words) else [f"--budget={FORMS[form]:g}"]
    probe = [] if name is None else [name]
    return [sys.executable, "-P", "-m", "distdiag", "probe", *probe, *words, *budget, "--json", "--no-record"]


def _probed(command: list[str], deadline_s: float) -> tuple[str, int | None]:
    """Return (standard output, exit code) of the probe; None as code if it did not end before the deadline."""
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    env = {k: v for k, v in os.environ.items() if k not in RANKS}  # it starts its own ranks
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        errors="replace", start_new_session=True, env=env,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        return process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))[0], process.returncode
    except subprocess.TimeoutExpired:
        return "", None
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(1.0)  # no longer: a process in a hung driver does not end
        process.stdout.close()


def _judged(output: str, code: int | None) -> tuple[str, str]:
    """Return (ok, fail or unknown; why)."""
    if code is None:
        return "unknown", f"the probe did not end within {DEADLINE_S:g} s and was killed"
    try:
        found = json.loads(output)
    except ValueError:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return "unknown", f"the probe ended with {how} and without a result"
    if "error" in found:
        return "unknown", f"{found['error']['message']} ({found['error']['hint']})"
    verdict, probes = found["verdict"], found.get("probes", [found])
    worst = [f"{p['probe']}: {reason}" for p in probes if p["verdict"] == verdict for reason in p["reasons"][:1]]
    if verdict == "pass":
        return "ok", f"{len(probes)} of {len(probes)} probes passed" if len(probes) > 1 else worst[0]
    return "fail" if verdict == "fail" else "unknown", "; ".join(worst)
