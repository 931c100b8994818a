"""Measures which faults a recorded job survives: killed ranks, monitors and readers in each phase; no disk, memory or files.

    make survival                    # each scenario ten times, in about half an hour; writes docs/survival.md
    python benchmarks/survival.py --times 10 --only monitor   # a part; the other rows are kept

Each job is two recorded processes without torch. Columns for each fault: how the job ended, and the answer of `diagnose`.
Scenarios that change mounts run in a mount namespace (`unshare -m`, root only), else they are skipped. Exit status 1 if an
outcome is not the expected one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
PHASES = ("start", "training", "checkpoint", "end")
LIMIT_S = 90.0
FULL_S = 10.0  # with a full disk; shorter jobs may still find space in the database for their last rows
JOB = """
import os, sys, time
from pathlib import Path
import distdiag
rank = os.environ["RANK"]
run = distdiag.attach()
def reach(phase, work):
    Path(f"{phase}.{rank}").touch()
    while not Path(f"go.{phase}").exists():
        work()
        time.sleep(0.02)
reach("start", lambda: None)
reach("training", run.step)
with run.phase("checkpoint"):
    reach("checkpoint", lambda: None)
run.step()
reach("end", lambda: None)
"""


RESULTS = ROOT / "benchmarks" / "results" / "survival.json"
EXPLAINED = """Two recorded processes without torch. *Job*: exit codes of the two ranks (-9: killed by the test). *Phase*: where both ranks
are when the process is killed; the job then runs to its end. In each outcome the job ends as it would without distdiag.
`diagnose` judges all that was written. If the disk never held a database, it answers "no data" (exit 4), never "no finding".
If no process was left that could see how the ranks ended, the run has failed (exit 1) and no cause is given."""


class Job:
    """Two recorded ranks in a directory; their run is in `R` below it."""

    def __init__(self, where: Path, run_dir: str = "R", files: int | None = None, port: int = 29611) -> None:
        self.where, self.run_dir = where, run_dir
        (where / "job.py").write_text(JOB)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DISTDIAG", "MASTER", "RANK", "TORCHELASTIC"))}
        env = {**kept, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "job.py"], cwd=where, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=limit,
                env={**env, "RANK": str(q), "LOCAL_RANK": str(q), "DISTDIAG_RUN_DIR": run_dir},
            )
            for q in (0, 1)
        ]  # fmt: skip

    def reached(self, phase: str) -> bool:
        return all((self.where / f"{phase}.{q}").exists() for q in (0, 1))

    def monitor(self) -> int | None:
        """Return the process that has the run's database open for writing."""
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                command = (proc / "cmdline").read_bytes().split(b"\0")
                if b"distdiag.monitor" in command and os.readlink(proc / "cwd") == str(self.where):
                    return int(proc.name)
            except OSError:
                continue
        return None

    def go(self, *phases: str) -> None:
        for phase in phases:
            (self.where / f"go.{phase}").touch()

    def end(self) -> str:
        """Return the exit codes of the ranks, or that they hang."""
        self.go(*PHASES)
        codes = []
        for p in self.ranks:
            try:
                codes.append(p.wait(LIMIT_S))
            except subprocess.TimeoutExpired:
                p.kill()
                codes.append("hung")
        return ", ".join(map(str, codes))


def wait_for(condition: Callable[[], object], limit_s: float = LIMIT_S) -> object:
    end = time.monotonic() + limit_s
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def closed(run: Path) -> bool:
    return (run / ".node_0.ended").exists()


def diagnose(where: Path, run_dir: str = "R") -> str:
    """Return exit code and first line of the verdict."""
    done = subprocess.run(
        [sys.executable, "-m", "distdiag", "diagnose", run_dir, "--json"], cwd=where, capture_output=True, text=True, timeout=LIMIT_S
    )  # fmt: skip
    try:
        r = json.loads(done.stdout)
    except ValueError:
        return f"exit {done.returncode}: {(done.stderr.splitlines() or ['nothing'])[0]}"
    if "error" in r:
        return f"exit {done.returncode}: {r['error']['message']}"
    found = sorted({f["kind"] + (f"/{f['cause']}" if f["cause"] else "") for f in r["findings"]}) or ["no finding"]
    return f"exit {done.returncode}: {r['state']}, {r['ranks_seen']} of {r['world_size']} ranks, {', '.join(found)}"


def finish(job: Job) -> tuple[str, str]:
    ended = job.end()
    wait_for(lambda: closed(job.where / job.run_dir), 30)
    return ended, diagnose(job.where, job.run_dir)


def kill(victim: str, phase: str) -> Callable[[Path], tuple[str, str]]:
    def run(where: Path) -> tuple[str, str]:
        job = Job(where)
        job.go(*PHASES[: PHASES.index(phase)])
        wait_for(lambda: job.reached(phase))
        wait_for(job.monitor, 30)
        if victim == "rank":
            job.ranks[1].kill()
        elif victim == "monitor":
            pid = job.monitor()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        else:
            wait_for(lambda: (where / "R" / "run.db").exists(), 30)
            master, slave = pty.openpty()
            screen = subprocess.Popen(
                [sys.executable, "-m", "distdiag", "tui", "R"], cwd=where, stdin=slave, stdout=slave, stderr=slave,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
            )  # fmt: skip
            time.sleep(1.5)
            screen.kill()
            screen.wait()
            os.close(master)
            os.close(slave)
        return finish(job)

    return run


def plain(where: Path, files: int | None = None) -> tuple[str, str]:
    return finish(Job(where, files=files))


def all_killed(where: Path) -> tuple[str, str]:
    job = Job(where)
    job.go("start")
    wait_for(lambda: job.reached("training"))
    pid = wait_for(job.monitor, 30)
    for victim in (pid, *(p.pid for p in job.ranks)):
        if isinstance(victim, int):
            os.kill(victim, signal.SIGKILL)
    return job.end(), diagnose(where)


def two_jobs(where: Path) -> tuple[str, str]:
    jobs = []
    for k in (0, 1):
        (where / str(k)).mkdir()
        jobs.append(Job(where / str(k), run_dir="../R", port=29620 + k))
    ends = [job.end() for job in jobs]
    runs = [where / "R", where / "R" / "attempt_1"]
    wait_for(lambda: all(map(closed, runs)), 30)
    return "; ".join(ends), "; ".join(diagnose(where, f"{r.relative_to(where)}/run.db") for r in runs)


def many_readers(where: Path) -> tuple[str, str]:
    job = Job(where)
    job.go("start")
    wait_for(lambda: (where / "R" / "run.db").exists() and job.reached("training"))
    readers = [sqlite3.connect(f"file:{where}/R/run.db?mode=ro", uri=True, timeout=5) for _ in range(200)]
    end = time.monotonic() + 3
    while time.monotonic() < end:
        for r in readers:
            try:
                r.execute("SELECT count(*) FROM meta").fetchall()
            except sqlite3.OperationalError:
                continue
    out = finish(job)
    for r in readers:
        r.close()
    return out


def disk_fills(where: Path) -> tuple[str, str]:
    """Fill the run's file system to the last byte once both ranks are in the database; the job continues for some polls."""
    job = Job(where)
    job.go("start")
    wait_for(lambda: job.reached("training") and ranks_written(where / "R") == 2)
    for size in (1 << 20, 1):
        with open(where / "R" / f"filling{size}", "wb", buffering=0) as f, contextlib.suppress(OSError):
            while f.write(bytes(size)):
                pass
    time.sleep(FULL_S)
    return finish(job)


def ranks_written(run: Path) -> int:
    try:
        con = sqlite3.connect(f"file:{run}/run.db?mode=ro", uri=True, timeout=5)
        with contextlib.closing(con):
            return con.execute("SELECT count(*) FROM rank").fetchone()[0]
    except sqlite3.Error:
        return 0


SOUND = "0, 0", "exit 0: ended, 2 of 2 ranks, no finding"
LOST = "0, -9", "exit 1: failed, 2 of 2 ranks, rank_lost/killed"
NO_DATA = "0, 0", "exit 4: "
Scenario = tuple[Callable[[Path], tuple[str, str]], tuple[str, str], str]
# by fault: the action, the expected outcome (`diagnose`: its beginning), the mount that it needs
SCENARIOS: dict[str, Scenario] = {
    "no fault": (plain, SOUND, ""),
    **{
        f"kill -9 of {v}, phase {p}": (kill(v, p), LOST if v == "rank" else SOUND, "")
        for v in ("rank", "monitor", "screen")
        for p in PHASES
    },
    # no process is left that knows the signal: a failed run, and no finding about its cause
    "kill -9 of both ranks and the monitor": (all_killed, ("-9, -9", "exit 1: failed, 2 of 2 ranks"), ""),
    "ulimit -n 64": (lambda where: plain(where, files=64), SOUND, ""),
    "two jobs in one directory": (two_jobs, (f"{SOUND[0]}; {SOUND[0]}", f"{SOUND[1]}; {SOUND[1]}"), ""),
    "200 readers of run.db": (many_readers, SOUND, ""),
    "/dev/shm of 64 KiB": (plain, SOUND, "mount -t tmpfs -o size=64k tmpfs /dev/shm"),
    "/dev/shm of 600 KiB": (plain, SOUND, "mount -t tmpfs -o size=600k tmpfs /dev/shm"),
    "read-only /dev/shm": (plain, SOUND, "mount -t tmpfs -o ro,size=1m tmpfs /dev/shm"),
    "disk that fills while the job runs": (
        disk_fills, ("0, 0", "exit 0: ended, 2 of 2 ranks, recorder/disk_full"), "mkdir R && mount -t tmpfs -o size=16m tmpfs R"
    ),
    "disk without room for a database (256 KiB)": (plain, NO_DATA, "mkdir R && mount -t tmpfs -o size=256k tmpfs R"),
    "read-only run directory": (plain, NO_DATA, "mkdir R && mount -t tmpfs -o ro,size=1m tmpfs R"),
}  # fmt: skip


def once(name: str) -> tuple[str, str]:
    """Run a scenario in a new directory; return what the job did and what `diagnose` answered."""
    run, _, mount = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix="survival-", ignore_cleanup_errors=True) as made:
        where = Path(made).resolve()
        if not mount:
            return run(where)
        command = f"cd {where} && {mount} && exec {sys.executable} {HERE} --inside '{name}' --where {where}"
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", command], capture_output=True, text=True, timeout=4 * LIMIT_S
        )
        lines = done.stdout.splitlines()
        return (lines[-2], lines[-1]) if len(lines) > 1 else ("skipped", done.stderr.strip().splitlines()[-1][:100])


def outcomes(name: str, times: int, parallel: int) -> Counter[tuple[str, str]]:
    """Run a scenario this many times; return how often each outcome occurred."""

    def attempt(_: int) -> tuple[str, str]:
        try:
            return once(name)
        except Exception as e:
            return "the scenario itself failed", f"{type(e).__name__}: {e}"[:120]

    with ThreadPoolExecutor(parallel) as pool:
        return Counter(pool.map(attempt, range(times)))


def as_expected(name: str, outcome: tuple[str, str]) -> bool:
    job, answer = SCENARIOS[name][1]
    return outcome[0] == "skipped" or (outcome[0] == job and outcome[1].startswith(answer))


def document(results: dict[str, list[list[str | int]]], machine: str, before: str) -> str:
    """Return the text of docs/survival.md; the sections after the table are kept from the text `before`."""
    rows = []
    for name in SCENARIOS:
        found = results.get(name, [["not run", "", 0]])
        total = sum(int(n) for _, _, n in found)
        rows += [f"| {name} | {n} of {total} | {job} | {answer} |" for job, answer, n in found]
    text = "\n".join([
        "# Faults survived", "", "Made by `make survival`.", machine, "", EXPLAINED, "", "| fault | n | job | `distdiag diagnose` |",
        "|---|---|---|---|", *rows, "",
    ])  # fmt: skip
    at = before.find("\n## ")
    return text + (before[at:] if at >= 0 else "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the table of faults that a recorded job survives.")
    parser.add_argument("--times", type=int, default=10, help="runs of each scenario")
    parser.add_argument("--parallel", type=int, default=4, help="concurrent jobs; they use little CPU")
    parser.add_argument(
        "--only", default="", help="scenarios whose name contains this; the rows of the others are kept"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "survival.md")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--where", type=Path, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.inside:
        print(*SCENARIOS[o.inside][0](o.where), sep="\n")
        return 0
    kept = json.loads(RESULTS.read_text())["scenarios"] if o.only and RESULTS.exists() else {}
    wrong = 0
    cpu = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    machine = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {cpu}, Linux {os.uname().release}, Python {sys.version.split()[0]}."
    for name in SCENARIOS:
        if o.only not in name:
            continue
        found = outcomes(name, o.times, o.parallel)
        kept[name] = [[job, answer, n] for (job, answer), n in found.most_common()]
        for outcome, n in found.most_common():
            bad = "" if as_expected(name, outcome) else "   <-- unexpected"
            wrong += bool(bad)
            print(f"{name}: {n} of {found.total()}: {' | '.join(outcome)}{bad}", flush=True)
        RESULTS.write_text(json.dumps({"machine": machine, "scenarios": kept}, indent=1) + "\n")
        o.output.write_text(document(kept, machine, o.output.read_text() if o.output.exists() else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
