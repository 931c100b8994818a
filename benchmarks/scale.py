"""Measures what node 0's monitor costs for jobs of N simulated ranks, and how soon planted faults are named.

    python benchmarks/scale.py [--world 8 64 256 1024 4096] [--seconds 20] [--connected]

Eight ranks a node, and once 1,024 ranks on one node. Ranks and other nodes are simulated (tests/simulated.py); monitor, states,
diagnosis and run.db are the real ones. Time is the job's own: a poll takes its CPU time, so other load on the machine changes no
latency; it does change the CPU time that a poll takes. Memory is private memory of the simulating process above what it had before the
monitor started.

With --connected, node 0's monitor is a real process, each other node has a real client, and time is real. That needs two free cores. Memory is
then that of the whole process.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distdiag.diagnosis import kinds
from distdiag.terms.statistics import interval_of_median
from tests.simulated import Connected, Job, Simulation, connected, simulated

RESULTS = Path(__file__).parent / "results" / "scale.md"
BEGIN, END = "<!-- by benchmarks/scale.py: begin -->", "<!-- end -->"  # the rest of the file is written by hand
WINDOW_S = 12.0  # of one sample of the cost: two polls of thousands of ranks
LATE_MS = 60.0


def private_mib(s: Simulation | Connected | None = None) -> float:
    gc.collect()
    process = s.monitor if isinstance(s, Connected) else psutil.Process()
    return process.memory_full_info().uss / 2**20


def after(s: Simulation | Connected, kind: str, limit_s: float) -> str:
    """Return after how many seconds a finding of this kind names the rank at fault, or the log of the run the lost node."""
    named = (
        (lambda: any(map(s.not_heard_of, s.lost)))
        if s.lost
        else lambda: any(s.odd in f.culprits for f in s.found(kind))
    )
    passed, _, found = s.run(limit_s, named)
    return f"{passed:.1f} s" if found else f"not in {limit_s:.0f} s"


def measure(job: Job, seconds: float, real: bool) -> str:
    """Return one row of the table."""
    start = connected if real else simulated
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made, start(job, Path(made)) as s:
        before = 0.0 if real else private_mib()
        s.run(15)
        shares = []
        for _ in range(max(3, round(seconds / WINDOW_S))):
            passed, used, _ = s.run(WINDOW_S)
            shares.append(100 * used / passed)
        if wrong := [f.message for kind in kinds.KINDS for f in s.found(kind)]:
            sys.exit(f"a healthy job has findings: {wrong}")
        memory = private_mib(s) - before
        interval = interval_of_median(np.asarray(shares))
        lost = "–"
        if job.nodes > 1:
            s.lost = {job.nodes - 1}
            lost = after(s, "", 30)
            s.lost = set()
            s.run(10)
        s.late_ms = LATE_MS
        late = after(s, "straggler", 60)
        s.late_ms = 0.0
        s.run(10)
        s.hang()
        hang = after(s, "deadlock", 30)
        passed, used, _ = s.run(12)
        return (
            f"| {job.world:,} | {job.nodes} | {np.median(shares):.1f} | {interval.low:.1f} – {interval.high:.1f} | {len(shares)} "
            f"| {100 * used / passed:.1f} | {memory:.0f} | {hang} | {late} | {lost} |"
        )


def write(lines: list[str]) -> None:
    """Replace what an earlier call has written."""
    before, _, rest = RESULTS.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    RESULTS.write_text("\n".join([before + BEGIN, *lines, END]) + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="*", default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--one-node", type=int, default=1024, help="ranks of the job on one node; 0: none")
    parser.add_argument("--connected", action="store_true", help="in real time, through the encrypted connection")
    o = parser.parse_args()
    where = f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()}), Python {platform.python_version()}"
    how = " --connected" * o.connected
    lines = [
        f"`python benchmarks/scale.py --seconds {o.seconds:g}{how}` on {where}; steps of 0.4 s.", "",
        f"The straggler is {LATE_MS:.0f} ms late in each step, on another node than node 0. Times are from the fault to the finding that names its rank, and to the line in the run's log that a node is not heard of.", "",
        "| ranks | nodes | % of a core, median | 95 % interval | n | % in a hang | private MiB | deadlock | straggler | lost node |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    jobs = [Job(world, min(8, world), sent=True) for world in o.world]
    for job in jobs + ([Job(o.one_node, o.one_node)] if o.one_node and not o.connected else []):
        lines.append(measure(job, o.seconds, o.connected))
        print(lines[-1], flush=True)
        write([*lines, "", f"load {os.getloadavg()[0]:.0f}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
