"""Faults that a recorded job survives: kills a rank, the monitor or a reader in each phase, and takes away disk, memory, files.

    make survival                    # ten times each; writes docs/survival.md
    python benchmarks/survival.py --times 1 --only monitor

Each job is two recorded processes without torch. Reported for each fault: how the job ended, and what `diagnose` answered.
Scenarios that change mounts run in a mount namespace of their own (`unshare -m`, root only), else they are skipped.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
PHASES = ("start", "training", "checkpoint", "end")
LIMIT_S = 90.0
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


EXPLAINED = "Two recorded processes without torch. *Job*: exit codes of the two ranks (-9: killed by the test)."


class Job:
    """Two recorded ranks in a directory; the run is in `R` below it."""

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
        """Process that holds the run's database open for writing."""
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
        """Exit codes of the ranks, or that they hang."""
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
    """Exit code and first line of the verdict."""
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


MOUNTS = {
    "/dev/shm of 64 KiB": "mount -t tmpfs -o size=64k tmpfs /dev/shm",
    "/dev/shm of 600 KiB": "mount -t tmpfs -o size=600k tmpfs /dev/shm",
    "read-only /dev/shm": "mount -t tmpfs -o ro,size=1m tmpfs /dev/shm",
    "full disk (run directory of 256 KiB)": "mkdir R && mount -t tmpfs -o size=256k tmpfs R",
    "read-only run directory": "mkdir R && mount -t tmpfs -o ro,size=1m tmpfs R",
}
SCENARIOS: dict[str, Callable[[Path], tuple[str, str]]] = {
    "no fault": plain,
    **{f"kill -9 of {v}, phase {p}": kill(v, p) for v in ("rank", "monitor", "screen") for p in PHASES},
    "kill -9 of both ranks and the monitor": all_killed,
    "ulimit -n 64": lambda where: plain(where, files=64),
    "two jobs in one directory": two_jobs,
    "200 readers of run.db": many_readers,
    **dict.fromkeys(MOUNTS, plain),
}


def once(name: str) -> tuple[str, str]:
    """Run a scenario in a new directory; what the job did, what `diagnose` answered."""
    with tempfile.TemporaryDirectory(prefix="survival-", ignore_cleanup_errors=True) as made:
        where = Path(made).resolve()
        if name not in MOUNTS:
            return SCENARIOS[name](where)
        command = f"cd {where} && {MOUNTS[name]} && exec {sys.executable} {HERE} --inside '{name}' --where {where}"
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", command], capture_output=True, text=True, timeout=4 * LIMIT_S
        )
        lines = done.stdout.splitlines()
        return (lines[-2], lines[-1]) if len(lines) > 1 else ("skipped", done.stderr.strip().splitlines()[-1][:100])


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the table of faults that a recorded job survives.")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "survival.md")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--where", type=Path, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.inside:
        print(*SCENARIOS[o.inside](o.where), sep="\n")
        return 0
    rows = []
    for name in SCENARIOS:
        if o.only not in name:
            continue
        outcomes: Counter[tuple[str, str]] = Counter()
        for _ in range(o.times):
            try:
                outcomes[once(name)] += 1
            except Exception as e:
                outcomes["the scenario itself failed", f"{type(e).__name__}: {e}"[:120]] += 1
        for (job, answer), n in outcomes.most_common():
            rows.append(f"| {name} | {n} of {o.times} | {job} | {answer} |")
            print(rows[-1], flush=True)
    cpu = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    machine = f"{os.cpu_count()} cores, {cpu}, Linux {os.uname().release}, Python {sys.version.split()[0]}"
    made = f"Made by `python benchmarks/survival.py --times {o.times}` on {time.strftime('%Y-%m-%d')}: {machine}."
    text = [
        "# Faults survived",
        "",
        made,
        "",
        EXPLAINED,
        "",
        "| fault | n | job | `distdiag diagnose` |",
        "|---|---|---|---|",
    ]
    text += [*rows, ""]
    o.output.write_text("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
