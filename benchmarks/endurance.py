"""Measures what the monitor needs over ten hours of a job, and the readers with 10,000 findings.

    python benchmarks/endurance.py [--hours 10] [--findings 10000] [--repeats 5]

Ten hours: the real monitor, with its database on disk, over the pages of two ranks with four steps a second and four collectives a
step; only the clock is faked, so that an hour of polls (one a second) takes some 10 s. Memory is this process's resident set; the
database is bounded to 16 MiB. Readers: medians over the repeats, with their range, of commands on a run with that many findings.
The result is written to benchmarks/results/endurance.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "endurance.md"
S = 10**9
KEEP = 16 << 20
STEPS_A_SECOND, CALLS_A_STEP = 4, 4
READERS = (["diagnose"], ["diagnose", "--json"], ["tui", "--once"], ["report", "--format", "text", "-o", "-"])


class Clock:
    """Stands for the functions of `time` in this process."""

    def __init__(self) -> None:
        self.real, self.wall = time.perf_counter, time.time()
        self.now_ns = time.monotonic_ns()
        self.began_ns = self.now_ns
        time.monotonic_ns = lambda: self.now_ns  # type: ignore[assignment]
        time.monotonic = lambda: self.now_ns / S  # type: ignore[assignment]
        time.time = lambda: self.wall + (self.now_ns - self.began_ns) / S  # type: ignore[assignment]
        time.time_ns = lambda: int(time.time() * S)  # type: ignore[assignment]

    def forward(self, by_ns: int) -> None:
        self.now_ns += by_ns


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def hours(count: float) -> list[tuple[float, float, float, float, int]]:
    """Return (hour, resident MiB, MiB of run.db with its log, ms per poll, open descriptors) at eleven moments."""
    clock = Clock()
    from distdiag import procfs
    from distdiag.monitor.loop import Monitor
    from distdiag.page import directories
    from distdiag.page.layout import LifeWord, Phase, page_path
    from distdiag.page.writer import PageWriter

    out = []
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        run = Path(folder) / "R"
        pages = directories.overflow(run, 0)
        directories.make(pages)
        made = []
        for rank in (0, 1):
            page = PageWriter(page_path(pages, rank))
            h = page.header
            h.pid, h.rank, h.world_size, h.local_world_size, h.life = os.getpid(), rank, 2, 2, LifeWord.RUNNING
            h.process_start_ticks = procfs.start_ticks("self") or 0
            h.started_mono_ns, h.started_wall_ns, h.phase = clock.now_ns, time.time_ns(), Phase.FORWARD
            h.facts, h.host = page.text('{"torch": "2.13.0"}'), page.text("here")
            slot = page.page.groups[0]
            slot.name, slot.description, slot.ranks = page.text("0"), page.text("default_pg"), page.text("0-1")
            h.n_groups = 1
            page.publish()
            made.append((page, page.text("all_reduce"), page.text("float32"), page.site("/job/train.py", 7, "main")))
        monitor = Monitor(run, pages, node=0, quiet=True, keep_bytes=KEEP)
        polls, step, calls, spent = int(count * 3600), 0, 0, 0.0
        for k in range(polls + 1):
            for _ in range(STEPS_A_SECOND):
                step += 1
                began = clock.now_ns
                for i in range(CALLS_A_STEP):
                    at = began + i * 10**7
                    for page, op, dtype, site in made:
                        n = calls + i + 1
                        page.write_call(op, 0, n, n, -1, 0, dtype, site, 1, 64, 0, 0, 0, 0, 0, 64, 256, -1, at, 10**6, at + 2 * 10**6, 0, step)  # fmt: skip
                calls += CALLS_A_STEP
                clock.forward(S // STEPS_A_SECOND)
                for page, _, _, _ in made:
                    h = page.header
                    page.write_step(step, 0, began, clock.now_ns, 10**7, 0, 5 * 10**7, 10**8, 10**7, 4 * 10**6, began + 10**7, 32, step, 1.0, 0, 0, began)  # fmt: skip
                    h.step, h.phase_since_ns, h.heartbeat_ns, h.counted_ns = (
                        step,
                        clock.now_ns,
                        clock.now_ns,
                        clock.now_ns,
                    )
                    page.page.groups[0].enqueued = page.page.groups[0].completed = calls
            started = clock.real()
            assert not monitor.tick()
            spent += clock.real() - started
            if k % max(1, polls // 10) == 0:
                size = sum(p.stat().st_size for p in run.glob("run.db*")) / 2**20
                descriptors = len(os.listdir("/proc/self/fd"))
                out.append((k / 3600, resident_bytes() / 2**20, size, spent / max(1, polls // 10) * 1e3, descriptors))
                spent = 0.0
                print(*(f"{x:8.2f}" for x in out[-1]), flush=True)
        open_ones = [f"{f.kind}/{f.cause}" for f in monitor.diagnosis.open("warning")]
        assert open_ones == [] and monitor.diagnosis.failures == {}, (open_ones, monitor.diagnosis.failures)
    return out


def many_findings(count: int, repeats: int) -> list[tuple[str, float, float, float, int]]:
    """Return (command, median s, least s, most s, bytes printed)."""
    from distdiag.diagnosis.model.findings import Finding, Where
    from distdiag.store.writer import Writer
    from tests.report.runs import make_run

    out = []
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        run = make_run(Path(folder) / "R", ranks=8, steps=200)
        with Writer(run) as w:
            for k in range(count):
                w.finding(
                    Finding(kind="nonfinite", cause="loss", severity="error" if k % 100 == 0 else "warning", culprits=(k % 8,), names=(f"loss {k}",),
                            where=(Where(k % 8, "/job/train.py", k, "main"),), first_seen_s=k / 10, detected_s=k / 10,
                            message=f"the loss of rank {k % 8} is NaN in step {k}", advice="look at the batch")
                )  # fmt: skip
            w.meta(ended_s=1000.0, monitor_ended=1)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for command in READERS:
            times, size = [], 0
            for _ in range(repeats):
                began = time.perf_counter()
                done = subprocess.run([sys.executable, "-m", "distdiag", command[0], str(run), *command[1:]], capture_output=True, env=env, check=False)  # fmt: skip
                times.append(time.perf_counter() - began)
                size = len(done.stdout)
                assert done.returncode in (0, 1) and not done.stderr.startswith(b"Traceback"), done.stderr
            out.append((" ".join(command), statistics.median(times), min(times), max(times), size))
            print(*out[-1], flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--findings", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    readers = many_findings(options.findings, options.repeats)
    course = hours(options.hours)
    machine = f"{os.cpu_count()} shared cores ({platform.machine()}, {platform.system()} {platform.release()}), no GPU, Python {platform.python_version()}"
    RESULT.write_text(
        f"# Ten hours of the monitor, and {options.findings:,} findings\n\n"
        f"`python benchmarks/endurance.py --hours {options.hours:g} --findings {options.findings} --repeats {options.repeats}` on {machine}.\n\n"
        f"Two ranks, {STEPS_A_SECOND} steps a second, {CALLS_A_STEP} collectives a step, one full poll a second, `--keep {KEEP >> 20}M`; the clock is faked.\n\n"
        "| hour | resident MiB | run.db with its log, MiB | ms per poll, mean since the row before | open descriptors |\n|---|---|---|---|---|\n"
        + "".join(f"| {h:.0f} | {m:.1f} | {d:.1f} | {p:.2f} | {n} |\n" for h, m, d, p, n in course)
        + f"\nReaders of a run of 8 ranks with {options.findings:,} open findings, n = {options.repeats}:\n\n"
        "| command | median s | range | bytes printed |\n|---|---|---|---|\n"
        + "".join(f"| `distdiag {c}` | {m:.2f} | {a:.2f} – {b:.2f} | {n:,} |\n" for c, m, a, b, n in readers)
    )


if __name__ == "__main__":
    main()
