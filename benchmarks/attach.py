"""Measures `distdiag attach` on the jobs of tests/faults started as people start them, without distdiag in the command.

    python benchmarks/attach.py hung --part 1/3       # attach to 20 hung jobs: rank, line, seconds
    python benchmarks/attach.py healthy --part 1/3    # attach to 20 healthy jobs again and again: no finding, and equal results

Each job is started by one of: torchrun, `torch.multiprocessing.spawn`, plain python with torch's variables, `accelerate launch`; the next job
by the next. It needs accelerate. benchmarks/one_variable.py starts the same jobs in the same way.
A hung job is attached to once its ranks are at the lines of its manifest. The rank is right if exactly the manifest's
culprits are named, the line if all lines of the manifest are shown. Each row is kept in benchmarks/results/attach.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from distdiag.attach.sample import py_spy  # noqa: E402
from tests.faults.collection import Job as Entry  # noqa: E402
from tests.faults.collection import load  # noqa: E402
from tests.jobs import Job, clean_env, free_port, marked, start  # noqa: E402

FAULTS = ROOT / "tests" / "faults"
RESULTS = ROOT / "benchmarks" / "results" / "attach.json"
SHIM = HERE.with_name("_as_rank.py")
WAYS = ("torchrun", "spawn", "environment", "accelerate")
READY_S, SETTLED_S, LIMIT_S = 8.0, 120.0, 150.0
GONE = ("exited", "finished", "crashed", "left_off", "stopped")
SEED, JOBS = 41, 20


def jobs(part: str, kind: str) -> list[tuple[Entry, str]]:
    """Return the jobs of a part, each with its launcher."""
    entries = load(FAULTS / "manifest.json").jobs
    if kind == "hung":
        drawn = random.Random(SEED).sample([e for e in entries if e.plain_outcome.type == "hang"], JOBS)
    else:
        fine = [
            e
            for e in entries
            if e.plain_outcome.type == "ok" and not e.faulty and e.name not in ("no_dist", "spawn_fine")
        ]
        drawn = [fine[int(i * len(fine) / JOBS)] for i in range(JOBS)]
    k, n = map(int, part.split("/"))
    return [(e, "python" if e.launch == "python" else WAYS[i % len(WAYS)]) for i, e in enumerate(drawn)][k - 1 :: n]


@contextmanager
def started(entry: Entry, how: str, env: dict[str, str]) -> Iterator[Job]:
    """Start a job; its marked processes are killed at the end."""
    script, n = str(FAULTS / entry.path), entry.nproc
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shim = [str(SHIM), how] if "DIGESTS" in env else []
    if how == "python":
        command = [sys.executable, script]
    elif how == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        command += [*shim, script]
    elif how == "accelerate":
        # its launcher of several processes on one host; with --cpu it starts one, or mpirun
        command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(n)]
        command += ["--main_process_port", address["MASTER_PORT"], "--num_machines", "1", "--mixed_precision", "no"]
        command += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", *shim, script]
    elif how == "spawn":
        command = [sys.executable, str(SHIM), f"spawn:{n}:{address['MASTER_PORT']}", script]
    else:
        given = " ".join(f"{k}={v}" for k, v in (address | {"WORLD_SIZE": str(n)}).items())
        one = [f"RANK={r} LOCAL_RANK={r} {given} {shlex.join([sys.executable, *shim, script])} &" for r in range(n)]
        command = ["bash", "-c", " ".join([*one, "wait"])]
    with start(command, env=env, timeout=600) as job:
        yield job


def attach(job: Job) -> tuple[dict[str, Any], float]:
    """Return the verdict and the seconds that the command took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "distdiag", "attach", str(job.process.pid), "--json"],
            env=clean_env(Path(home)), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    return {"findings": [], **json.loads(done.stdout or "{}")}, time.monotonic() - began


# -- hung --------------------------------------------------------------------------------------------------------------


def settle(entry: Entry, job: Job) -> bool:
    """Wait until the lines of the manifest are in the stacks of the job's processes; False if they never are."""
    wanted = {(str(FAULTS / p.file), line) for p in entry.positions if p.state not in GONE
              for line in [range(p.line, (p.last_line or p.line) + 1)]}  # fmt: skip
    time.sleep(READY_S)
    end, before, again = time.monotonic() + SETTLED_S, "", 0
    while time.monotonic() < end and job.process.poll() is None:
        text = "".join(_stacks(pid) for pid, command in marked(job.mark).items() if "python" in command)
        at = {(Path(m[1]).name, int(m[2])) for m in re.finditer(r" \((\S+?):(\d+)\)$", text, re.MULTILINE)}
        there = all(any((Path(file).name, line) in at for line in lines) for file, lines in wanted)
        again = again + 1 if there and (text == before or any(p.last_line for p in entry.positions)) else 0
        if again == 2:
            return True
        before = text
        time.sleep(3)
    return False


def _stacks(pid: int) -> str:
    """Return the main thread's stack with its local variables."""
    command = [py_spy(), "dump", "--locals", "--nonblocking", "--pid", str(pid)]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return next((t for t in text.split("\nThread ") if '"MainThread"' in t), "")


def hung(entry: Entry, how: str) -> dict[str, Any]:
    with started(entry, how, {}) as job:
        ready = settle(entry, job)
        found, seconds = attach(job)
    findings = found["findings"]  # of a rank that computes: info
    shown = {(w["rank"], w["line"]) for f in findings for w in (*f["where"], *f["waiting"])}
    wanted = [p for p in entry.positions if p.state not in GONE]
    named = [tuple(sorted(f["culprits"])) for f in findings]
    right = tuple(sorted(entry.expected.culprits))
    rank = len(named) == 1 and (named[0] == right or named[0] in entry.expected.culprits_any)
    line = bool(findings) and all(
        any((p.rank, n) in shown for n in range(p.line, (p.last_line or p.line) + 1)) for p in wanted
    )
    return {
        "ready": ready, "rank": rank, "line": line, "seconds": round(seconds, 1),
        "severity": [f["severity"] for f in findings], "named": named, "expected": right,
        "message": [f["message"] for f in found["findings"]], "error": found.get("error"), "notes": found.get("notes"),
    }  # fmt: skip


# -- healthy -----------------------------------------------------------------------------------------------------------


def healthy(entry: Entry, how: str) -> dict[str, Any]:
    """Attach to one of two equal jobs until it ends, and compare what both computed and printed."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        with started(entry, how, {"DIGESTS": one}) as alone, started(entry, how, {"DIGESTS": other}) as job:
            seen, unjudged, bad, pauses = 0, 0, [], []
            while job.process.poll() is None:
                found, _ = attach(job)
                seen += found.get("ranks_seen", 0) == entry.nproc
                unjudged += "attach again" in (found.get("unjudged") or "")
                bad += [f["message"] for f in found.get("findings", ()) if f["severity"] != "info"]
                pauses += [
                    int(ms)
                    for note in found.get("notes", ())
                    if "longest pause" in note
                    for ms in re.findall(r"(\d+) ms", note)
                ]
            codes = job.wait(LIMIT_S), alone.wait(LIMIT_S)
            texts = [_results(x) for x in (job, alone)]
        digests = [{p.name: p.read_text() for p in Path(d).iterdir()} for d in (one, other)]
    steps = sum(int(text.split()[0]) for text in digests[0].values())
    return {
        "attached": seen, "unjudged": unjudged, "bad": bad, "codes": codes, "equal": digests[0] == digests[1] and texts[0] == texts[1],
        "optimizer_steps": steps, "longest_pause_ms": max(pauses, default=0),
    }  # fmt: skip


def _results(job: Job) -> list[str]:
    """Return the printed lines; of those with a time or a rate, which differ between any two runs, the words."""
    timed = re.compile(r"\d(?: ?m?s\b|/s)|sec|time|took", re.IGNORECASE)
    return sorted(re.sub(r"\d[\d.]*", "", line) if timed.search(line) else line for line in job.stdout().splitlines())


# -- results -----------------------------------------------------------------------------------------------------------


def keep(kind: str, name: str, how: str, row: dict[str, Any]) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found.setdefault(kind, {})[name] = {
        "launcher": how, **row, "load": round(os.getloadavg()[0], 1), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def summary(kind: str) -> dict[str, Any]:
    """Return what the kept rows of this sample amount to."""
    kept = json.loads(RESULTS.read_text()).get(kind, {})
    of = [kept[e.name] for e, how in jobs("1/1", kind) if kept.get(e.name, {}).get("launcher") == how]
    if kind == "healthy":
        return {
            "jobs": len(of), "attached": sum(r["attached"] for r in of), "no_finding": sum(not r["bad"] for r in of),
            "equal": sum(r["equal"] and r["codes"] == [0, 0] for r in of),
        }  # fmt: skip
    seconds = [r["seconds"] for r in of]
    return {
        "jobs": len(of), "ready": sum(r["ready"] for r in of), "rank": sum(r["rank"] for r in of), "line": sum(r["line"] for r in of),
        "within_5_s": sum(x <= 5 for x in seconds), "median_s": statistics.median(seconds or [0]), "max_s": max(seconds, default=0),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["hung", "healthy"])
    parser.add_argument("--part", default="1/1", help="K/N: every N-th job from the K-th on")
    parser.add_argument("--only", help="names of jobs, with commas between them")
    given = parser.parse_args()
    need_accelerate(parser)
    measure = {"hung": hung, "healthy": healthy}[given.kind]
    for entry, how in jobs(given.part, given.kind):
        if given.only and entry.name not in given.only.split(","):
            continue
        row = measure(entry, how)
        print(entry.name, how, json.dumps(row), flush=True)
        keep(given.kind, entry.name, how, row)
    print(json.dumps(summary(given.kind)))


def need_accelerate(parser: argparse.ArgumentParser) -> None:
    if importlib.util.find_spec("accelerate") is None:
        parser.error("accelerate is not installed: make realcode, then take .venv-realcode/bin/python")


if __name__ == "__main__":
    main()
