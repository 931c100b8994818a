"""Measures what `distdiag history` takes for 200 runs: read from their databases, and asked again from the Parquet file.

    python benchmarks/history.py [--runs 200] [--rounds 10]

Output: CPU and wall seconds of the whole command, start of Python included; mean over rounds, the CPU's with a 95 % interval
(Student's t on logarithms). On a machine whose cores others use, only the CPU seconds say something about distdiag.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distdiag.terms.statistics import interval_of_rounds
from tests.history.runs import write_fleet

RESULTS = Path(__file__).parent / "results"
ALLOWED_S = 2.0


def seconds(arguments: list[str], rounds: int) -> list[tuple[float, float]]:
    """Return (CPU, wall) of each round but the first."""
    out = []
    for _ in range(rounds + 1):
        began, used = time.perf_counter(), cpu_s()
        subprocess.run(
            [sys.executable, "-m", "distdiag", "history", *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        out.append((cpu_s() - used, time.perf_counter() - began))
    return out[1:]


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    o = parser.parse_args()
    where = f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()}), Python {platform.python_version()}"
    lines = [
        "# What a question to many runs takes", "",
        f"`python benchmarks/history.py --runs {o.runs} --rounds {o.rounds}` on {where}.", "",
        "| asked | CPU s, mean | 95 % interval | wall s, mean | fastest | load of the machine | n | allowed |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    worst = 0.0
    with tempfile.TemporaryDirectory() as made:
        runs, file = Path(made) / "runs", Path(made) / "runs.parquet"
        write_fleet(runs, o.runs)
        for name, arguments in (
            (f"{o.runs} runs, from their databases", [str(runs)]),
            (f"{o.runs} runs, databases, Parquet written", [str(runs), "--parquet", str(file), "--force"]),
            (f"{o.runs} runs, from Parquet", [str(file)]),
            (
                f"{o.runs} runs, from Parquet, --sql",
                [str(file), "--sql", "SELECT host, count(*) FROM findings GROUP BY host"],
            ),
        ):
            cpu, wall = zip(*seconds(arguments, o.rounds), strict=True)
            interval = interval_of_rounds(cpu)
            worst = max(worst, interval.low)
            lines.append(
                f"| {name} | {statistics.fmean(cpu):.2f} | {interval.low:.2f} – {interval.high:.2f} | {statistics.fmean(wall):.2f} "
                f"| {min(wall):.2f} | {os.getloadavg()[0]:.1f} | {len(cpu)} commands | {ALLOWED_S:.0f} |"
            )
    text = "\n".join(lines) + "\n"
    (RESULTS / "history.md").write_text(text)
    print(text)
    return 0 if worst <= ALLOWED_S else 1


if __name__ == "__main__":
    sys.exit(main())
