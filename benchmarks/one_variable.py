"""Compares the verdicts of DISTDIAG=1 with those of `distdiag.run`, on 40 jobs of tests/faults.

    python benchmarks/one_variable.py hung --part 1/2     # of 20 hung jobs: kind, culprits, lines, condition
    python benchmarks/one_variable.py healthy             # of 20 healthy ones: no warning, exit code 0

Each job runs twice: by `-m distdiag.run`, as the fault tests start it, and plainly with DISTDIAG=1 in its environment, started by one of
torchrun, `torch.multiprocessing.spawn`, plain python with torch's variables, `accelerate launch`; the next job by the next. It needs accelerate.
Each row is kept in benchmarks/results/one_variable.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import attach  # noqa: E402
from distdiag.diagnosis.model.findings import Finding, Severity, Where, at_least  # noqa: E402
from tests.faults.collection import Job as Entry  # noqa: E402
from tests.faults.collection import Running  # noqa: E402
from tests.faults.scorecard import best, run_job, watch  # noqa: E402
from tests.jobs import rows  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "one_variable.json"
# not in the launcher of the tests, which forks the ranks of `distdiag.run`
_CONDITION = re.compile(r"`((?:if|elif|while|for) [^`]*)`(?! \(launchers\.py)")


def verdict(entry: Entry, findings: list[Finding]) -> dict[str, Any]:
    """Return what a person reads: who, where, why."""
    f = best(entry, attach.FAULTS, findings) if entry.faulty else None
    others = sorted(
        x.kind for x in findings if x is not f and at_least(x.severity, Severity.WARNING) and x.cleared_s is None
    )
    if f is None:
        return {"kind": None, "others": others}
    wanted = {p.rank for p in entry.positions if p.role != "victim"} | set(f.culprits)
    places = {
        f"rank {w.rank}: {Path(w.file).name}:{_line(entry, w)}"
        for w in (*f.where, *f.waiting)
        if w.rank in wanted and w.file
    }
    return {
        "kind": f.kind, "cause": f.cause, "culprits": sorted(f.culprits), "places": sorted(places),
        "condition": sorted(set(_CONDITION.findall(f.message))), "others": others, "message": f.message,
    }  # fmt: skip


def _line(entry: Entry, w: Where) -> int | None:
    """Return the line; of a loop in which any line is right, its first one."""
    of_rank = (p for p in entry.positions if p.rank == w.rank and w.file and Path(w.file).name == Path(p.file).name)
    return next((p.line for p in of_rank if p.covers(w.line)), w.line)


def plainly(entry: Entry, how: str) -> dict[str, Any]:
    """Run a job with DISTDIAG=1 by a launcher; return its verdict and its exit code (None: ended by us)."""
    with tempfile.TemporaryDirectory(prefix="one-variable-") as made:
        run = Path(made) / "run"
        with attach.started(entry, how, {"DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(run)}) as job:
            running = Running(job.process, job.mark, job.directory / "stdout", job.cwd)
            observed, found_s = watch(entry, attach.FAULTS, running, run)
            code = job.process.poll()
        ranks = sorted(r for (r,) in rows(run, "SELECT rank FROM rank"))
        others = [str(p.parent.relative_to(run)) for p in run.glob("**/run.db") if p.parent != run]
    one = ranks == list(range(entry.nproc)) and not others
    return verdict(entry, list(observed.findings)) | {"code": code, "one_run": one, "found_s": found_s}


def compare(entry: Entry, how: str) -> dict[str, Any]:
    """Run a job both ways."""
    score = run_job(entry, attach.FAULTS)
    with_run = verdict(entry, score.findings) | {"code": score.exit_code, "found_s": score.launch_to_finding_s}
    with_variable = plainly(entry, how)
    keys = ("kind", "culprits", "places", "condition", "others") if entry.faulty else ("kind", "others", "code")
    differ = [k for k in keys if with_run.get(k) != with_variable.get(k)]
    return {"differ": differ, "one_run": with_variable["one_run"], "run": with_run, "variable": with_variable}


def keep(kind: str, name: str, how: str, row: dict[str, Any]) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found["versions"] = {p: importlib.metadata.version(p) for p in ("torch", "accelerate")}
    found.setdefault(kind, {})[name] = {
        "launcher": how, **row, "load": round(os.getloadavg()[0], 1), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["hung", "healthy"])
    parser.add_argument("--part", default="1/1", help="K/N: every N-th job from the K-th on")
    parser.add_argument("--only", help="names of jobs, with commas between them")
    given = parser.parse_args()
    attach.need_accelerate(parser)
    for entry, how in attach.jobs(given.part, given.kind):
        if given.only and entry.name not in given.only.split(","):
            continue
        row = compare(entry, how)
        print(entry.name, how, json.dumps(row), flush=True)
        keep(given.kind, entry.name, how, row)


if __name__ == "__main__":
    main()
