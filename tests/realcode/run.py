"""`make realcode`: run scripts on real libraries without distdiag and recorded, and their bugs; write docs/realcode.md.

Usage: python tests/realcode/run.py [NAME…] [--write]

The healthy scripts run twice, without distdiag and recorded: exit code and printed losses must be the same, and nothing of
severity warning or above may be found. The bugs run under distdiag, and the verdict must have the right kind and rank.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.collection import Expected, Job, Outcome, load, started
from tests.faults.scorecard import Score, run_job
from tests.jobs import rows
from tests.realcode.bugs import BUGS, Bug

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "torchmetrics", "timm", "open_clip_torch")
RANKS = {"tensor_parallel": 4}
EPOCHS = {
    "accelerate_named": {0, 1, 2, 3},
    "hf_named": {0, 1, 2},
    "lightning_named": {0, 1, 2, 3},
}  # that a callback names
DEADLINE_S = 150.0
_RESULT = re.compile(r"^.*\b(?:loss|accuracy|norm|eval|done|generated|graphs)\b.*\d.*$", re.MULTILINE)


def manifest_of(folder: Path, bugs: list[Bug]) -> Path:
    """Write the scripts with their bugs and a manifest for `distdiag bench faults`; return its path."""
    jobs = []
    (folder / "jobs").mkdir()
    for bug in bugs:
        text = (HERE / "jobs" / f"{bug.base}.py").read_text()
        for old, new in bug.edits:
            if text.count(old) != 1:
                raise SystemExit(f"realcode: error: {bug.name}: {old!r} is {text.count(old)} times in {bug.base}.py")
            text = text.replace(old, new)
        (folder / "jobs" / f"{bug.name}.py").write_text(text)
        ranks = RANKS.get(bug.base, 2)
        lines = [n for n, line in enumerate(text.splitlines(), 1) if bug.line and bug.line in line]
        jobs.append(
            {
                "name": bug.name, "nproc": ranks, "faulty": True, "diagnosis": bug.about,
                "launch": "python" if bug.base == "spawn_ddp" else "torchrun",
                "plain_outcome": {"type": bug.ends}, "deadline_s": DEADLINE_S,
                "expected": {
                    "kinds_any_or_all": bug.kinds, "culprits": bug.ranks,
                    "culprits_any": [[], *([r] for r in range(ranks)), list(range(ranks))] if bug.any_rank else [],
                },
                "positions": [
                    {"rank": r, "role": "culprit", "file": f"jobs/{bug.name}.py", "line": lines[0]} for r in bug.ranks if lines
                ],
            }
        )  # fmt: skip
    path = folder / "manifest.json"
    path.write_text(json.dumps({"about": "real libraries", "jobs": jobs}))
    return path


def run_once(name: str, folder: Path, run_dir: Path | None) -> tuple[int | None, list[str], float]:
    """Run a healthy script; return its exit code (None: not in time), the lines with results, and seconds."""
    job = Job(
        name=name, nproc=RANKS.get(name, 2), faulty=False, diagnosis="", plain_outcome=Outcome(type="ok"), expected=Expected(),
        launch="python" if name == "spawn_ddp" else "torchrun",
    )  # fmt: skip
    folder.mkdir()
    off = {"DISTDIAG": "0"} if run_dir is None else {}  # a callback would record the job
    with started(job, HERE / "jobs" / f"{name}.py", folder, run_dir, off) as running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(DEADLINE_S)
        return running.process.poll(), sorted(_RESULT.findall(running.output())), running.age_s()


def healthy(name: str, folder: Path) -> dict[str, Any]:
    """Return how a healthy script ran without distdiag and recorded."""
    code, results, plain_s = run_once(name, folder / f"{name}-plain", None)
    run_dir = folder / name / "run"
    recorded_code, recorded, recorded_s = run_once(name, folder / name, run_dir)
    done = subprocess.run(
        [sys.executable, "-m", "distdiag", "diagnose", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        findings = [{"kind": "unreadable", "severity": "error", "message": done.stderr[-300:]}]
    accused = [f for f in findings if f["severity"] != "info"]
    named = {epoch for (epoch,) in rows(run_dir, "SELECT DISTINCT epoch FROM step")} if name in EPOCHS else None
    if named != EPOCHS.get(name):
        accused.append({"kind": "epochs", "message": f"{named} instead of {EPOCHS[name]}"})
    return {
        "name": name, "code": code, "identical": code == recorded_code == 0 and bool(results) and results == recorded,
        "recorded_code": recorded_code, "accused": [f"{f['kind']}: {f['message'][:160]}" for f in accused],
        "plain_s": plain_s, "recorded_s": recorded_s,
    }  # fmt: skip


def judge(folder: Path, bugs: list[Bug]) -> Iterator[Score]:
    """Run the bugs under distdiag, and yield the score of each."""
    manifest = manifest_of(folder, bugs)
    for job in load(manifest).jobs:
        yield run_job(job, folder, None, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="healthy scripts or bugs (default: all)")
    parser.add_argument("--write", action="store_true", help="write docs/realcode.md")
    arguments = parser.parse_args()
    scripts = [p.stem for p in sorted((HERE / "jobs").glob("*.py"))]
    wanted = set(arguments.names or [*scripts, *(b.name for b in BUGS)])
    if unknown := wanted - {*scripts, *(b.name for b in BUGS)}:
        raise SystemExit(f"realcode: error: no script or bug {', '.join(sorted(unknown))}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="realcode-") as made:
        ran = []
        for name in scripts:
            if name in wanted:
                ran.append(healthy(name, Path(made)))
                r = ran[-1]
                print(f"{'ok ' if _right(r) else 'NO '} {name}: {_outcome(r)}", flush=True)
        scores = []
        for s in judge(Path(made), [b for b in BUGS if b.name in wanted]):
            scores.append(s)
            lines = f", lines {s.lines_right} of {s.lines_expected}" if s.lines_expected else ""
            print(f"{'ok ' if s.right else 'NO '} {s.name}: {s.got}{lines} {'' if s.right else _wrong(s)}", flush=True)
    minutes = (time.monotonic() - began) / 60
    if arguments.write:
        (ROOT / "docs" / "realcode.md").write_text(_document(ran, scores, minutes))
    return 0 if all(map(_right, ran)) and all(s.right for s in scores) else 1


def _right(r: dict[str, Any]) -> bool:
    return r["identical"] and not r["accused"]


def _outcome(r: dict[str, Any]) -> str:
    if not r["identical"]:
        return f"exit codes {r['code']} and {r['recorded_code']}, or other results"
    return "; ".join(r["accused"]) or "identical, nothing found"


def _wrong(s: Score) -> str:
    return "; ".join([f"expected {s.expected}", *([s.problem] if s.problem else []), *s.false_findings])


def _document(ran: list[dict[str, Any]], scores: list[Score], minutes: float) -> str:
    by_name = {b.name: b for b in BUGS}
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in PACKAGES)
    right = sum(s.right for s in scores)
    lines = sum(s.lines_right for s in scores), sum(s.lines_expected for s in scores)
    return "\n".join(
        [
            "# Real libraries", "",
            (f"`make realcode`, {time.strftime('%Y-%m-%d')}: {versions}; Python {platform.python_version()}, {os.cpu_count()} cores, gloo, "
             f"{minutes:.0f} minutes, n = 1 run each. Tiny models with random weights, made-up data."), "",
            ("The scripts are in `tests/realcode/jobs`. Each healthy one ran twice: without distdiag, and recorded. *Identical*: same exit code, and the same losses and metrics printed, to the "
             "last digit."), "",
            f"{sum(map(_right, ran))} of {len(ran)} healthy scripts identical and without a finding of severity warning or above.", "",
            "| script | recorded, compared with the run without distdiag |", "|---|---|",
            *(f"| `{r['name']}` | {_outcome(r)} |" for r in ran), "",
            f"{right} of {len(scores)} bugs with the right kind and ranks; the culprit's line in {lines[0]} of {lines[1]}.", "",
            "| bug | in | found | right |", "|---|---|---|---|",
            *(f"| {by_name[s.name].about} | {by_name[s.name].base} | {s.got} | {'yes' if s.right else 'no'} |" for s in scores), "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
