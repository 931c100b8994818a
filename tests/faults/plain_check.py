"""Check a fault collection: without distdiag, each job must do what its manifest states."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from tests.faults.collection import Job, Running, interrupted, started

POLL_FROM_S = 8.0  # on free cores hangs are complete within 15 s of the launch; poll earlier
POLL_EVERY_S = 2.0
LIMIT_S = 300.0  # loaded machines take ten times as long as free ones

# every Python process of the job answers SIGUSR1 with its stacks, written by C code that needs no GIL
_ON_SIGNAL = """
import faulthandler, os, signal
faulthandler.register(signal.SIGUSR1, file=open(os.environ["DISTDIAG_BENCH_STACKS"] + f"/{os.getpid()}", "w"))
"""


class PlainResult(msgspec.Struct, kw_only=True):
    """What one job did without distdiag; `problems`: the differences to its manifest."""

    name: str
    outcome: str
    seconds: float
    problems: list[str]
    output_tail: str = ""


def check(job: Job, folder: Path, environment: dict[str, str] | None = None) -> PlainResult:
    """Run one job under plain torchrun and compare its outcome and positions with the manifest.

    Args:
        environment: Additional variables, from `backend_environment`. A sitecustomize on its PYTHONPATH imports ours.
    """
    environment = environment or {}
    problems = _line_texts(job, folder)
    script = folder / job.path
    with tempfile.TemporaryDirectory(prefix="distdiag-plain-") as tmp:
        work, site, stacks = Path(tmp, "work"), Path(tmp, "site"), Path(tmp, "stacks")
        for d in (work, site, stacks):
            d.mkdir()
        (site / "sitecustomize.py").write_text(_ON_SIGNAL)
        env = {
            **environment,
            "PYTHONPATH": os.pathsep.join(
                p for p in (environment.get("PYTHONPATH", ""), str(site), os.environ.get("PYTHONPATH", "")) if p
            ),
            "DISTDIAG_BENCH_STACKS": str(stacks),
        }
        with started(job, script, work, None, env) as running:
            hang = job.plain_outcome.type == "hang"
            still = ["not checked"]
            seen: dict[int, list[tuple[str, int]]] = {}
            while not running.ended and running.age_s() < LIMIT_S and not interrupted.is_set():
                time.sleep(0.1)
                if hang and running.age_s() > POLL_FROM_S:
                    frames, earlier = _frames(job, running, stacks), seen
                    # on another backend ranks wait at other lines: there a job hangs if no frame changes
                    now = [] if environment and frames and frames == earlier else _wrong_lines(job, folder, frames)
                    before, still, seen = still, now, frames
                    if not before and not still:
                        break
                    time.sleep(POLL_EVERY_S)
            seconds = running.age_s()
            if running.ended:
                outcome = "ok" if running.process.returncode == 0 else "crash"
                if outcome == "crash":
                    problems += _crash_lines(job, folder, running.output())
            else:
                outcome = "hang"
                problems += still
            output = running.output()
    if outcome != job.plain_outcome.type:
        problems.insert(0, f"outcome {outcome}, the manifest has {job.plain_outcome.type}")
    for piece in (job.plain_outcome.message or "").split(" | ") if outcome == "crash" else ():
        if piece and piece not in output:
            problems.append(f"the output lacks {piece!r}")
    return PlainResult(
        name=job.name, outcome=outcome, seconds=round(seconds, 1), problems=problems, output_tail=output[-3000:]
    )


def _line_texts(job: Job, folder: Path) -> list[str]:
    problems = []
    for p in job.positions:
        lines = (folder / p.file).read_text().splitlines()
        text = lines[p.line - 1].strip() if 0 < p.line <= len(lines) else ""
        if p.code is not None and text != p.code.strip():
            problems.append(f"{p.file}:{p.line} is {text!r}, the manifest has {p.code!r}")
    return problems


def _wrong_lines(job: Job, folder: Path, frames: dict[int, list[tuple[str, int]]]) -> list[str]:
    """Return the ranks whose innermost user frame is not at the manifest's line."""
    problems = []
    for p in job.positions:
        if p.state in ("stopped", "exited", "finished", "crashed", "left_off"):
            continue
        script = str((folder / p.file).resolve())
        line = next((line for file, line in frames.get(p.rank, []) if file == script), None)
        if not p.covers(line):
            problems.append(f"rank {p.rank} is at line {line}, the manifest has {p.line}")
    return problems


def _frames(job: Job, running: Running, stacks: Path) -> dict[int, list[tuple[str, int]]]:
    """Return the main thread's frames by rank, innermost first: (file, line)."""
    by_rank: dict[int, int] = {}
    spawned = []
    for p in running.processes():
        try:
            env, parent = p.environ(), p.parent()
            if job.launch == "torchrun" and "RANK" in env and parent is not None and parent.pid == running.process.pid:
                by_rank[int(env["RANK"])] = p.pid
            elif job.launch == "python" and "spawn_main" in " ".join(p.cmdline()):
                spawned.append(p.pid)
        except (psutil.Error, OSError):
            continue
    by_rank.update(enumerate(sorted(spawned)))  # mp.spawn starts its ranks in order
    found = {}
    for rank, pid in by_rank.items():
        path = stacks / str(pid)
        if not path.exists():
            continue  # too early: the signal would kill it
        before = path.stat().st_size
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and path.stat().st_size <= before:
            time.sleep(0.02)
        time.sleep(0.05)
        text = path.read_text()[before:]
        # the main thread comes last in a dump
        main = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.M)[-1]
        found[rank] = [(m[1], int(m[2])) for m in re.finditer(r'File "(.*?)", line (\d+)', main)]
    return found


def _crash_lines(job: Job, folder: Path, output: str) -> list[str]:
    problems = []
    for p in job.positions:
        if p.state != "crashed":
            continue
        script = re.escape(str((folder / p.file).resolve()))
        prefix = rf"\[rank{p.rank}\]:\s*" if job.launch == "torchrun" and f"[rank{p.rank}]:" in output else ""
        if not any(p.covers(int(m[1])) for m in re.finditer(rf'{prefix}\s*File "{script}", line (\d+)\b', output)):
            problems.append(f"rank {p.rank} left no traceback through line {p.line}")
    return problems
