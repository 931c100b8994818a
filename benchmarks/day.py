"""Measures run.db and memory over a simulated day of a job of many ranks.

    python benchmarks/day.py [--ranks 1024] [--hours 24] [--step 4] [--keep 256]

The rows of the steps, of the state of all ranks (one frame per poll) and of one collective a step go through the code that makes and
writes them in node 0's monitor, into a real database that is thinned as in a job; only the clock is faked. The polls are those of a
calm job, eight seconds apart, or once a step. Asserted: the database stays within its bound, once it has reached it, and memory does not grow after
the first quarter. The result is written to benchmarks/results/day.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sqlite3
import sys
import tempfile
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.endurance import Clock, resident_bytes

RESULT = Path(__file__).parent / "results" / "day.md"
S = 10**9
POLL_S = 8.0
SPARE = 1.1  # of the bound: what one poll writes before a slice is thinned, and SQLite's log
GROWTH_MIB = 30.0  # of memory after the first quarter: noise of the allocator


class Job:
    """Ranks that all end a step every `step_s` seconds."""

    def __init__(self, ranks: int, step_s: float) -> None:
        from distdiag.diagnosis.model.snapshot import RankState, Step

        r = random.Random(1)
        ms = step_s * 1e3
        self.kinds = [
            Step(0, 0.0, ms, 0.02 * ms, 0.5 * ms + q % 7, 0.2 * ms, 0.02 * ms, 0.2 * ms - q % 7, 0.06 * ms, 0.0, 8, 8, r.random())
            for q in range(ranks)
        ]  # fmt: skip
        self.ranks = {q: RankState(rank=q, node=q // 8, host=f"node{q // 8}", rss_bytes=q << 20) for q in range(ranks)}
        self.random, self.step_s, self.number, self.newest = r, step_s, 0, dict[int, list[Step]]()

    def until(self, t_s: float) -> dict[int, list]:
        """Return the steps that have ended since the last call, by rank."""
        out: dict[int, list] = {q: [] for q in self.ranks}
        replace = msgspec.structs.replace
        while (self.number + 1) * self.step_s <= t_s:
            self.number += 1
            end_s, loss = self.number * self.step_s, self.random.random()
            for q, x in enumerate(self.kinds):
                out[q].append(replace(x, step=self.number, end_s=end_s, ready_s=end_s - 0.1 - q * 1e-6, loss=loss))
        return out


def day(ranks: int, hours: float, step_s: float, keep: int) -> list[tuple[float, float, float, float, int, int, int]]:
    """Return (hour, resident MiB, MiB of run.db, ms per poll, rows of steps, of minutes, frames) at 13 moments."""
    clock = Clock()
    from distdiag.diagnosis.model.findings import State
    from distdiag.diagnosis.model.snapshot import Snapshot
    from distdiag.monitor.rows import Steps, rank_rows
    from distdiag.monitor.windows import Windows, window_of
    from distdiag.store.rows import CollectiveRow
    from distdiag.store.thinning import database_bytes
    from distdiag.store.writer import Writer

    out, began_ns = [], clock.now_ns
    with tempfile.TemporaryDirectory(prefix="day-") as folder:
        writer = Writer(Path(folder) / "R", keep_bytes=keep)
        job, steps, windows, spent = Job(ranks, step_s), Steps(), Windows(), 0.0
        windows.take({q: window_of(job.kinds[q : q + 1]) for q in job.ranks})  # other nodes send theirs
        poll_s = max(POLL_S, step_s)
        polls, newest = round(hours * 3600 / poll_s), dict.fromkeys(job.ranks, ())
        for k in range(polls + 1):
            clock.forward(int(poll_s * S))
            t_s = (clock.now_ns - began_ns) / S
            for q, new in job.until(t_s).items():
                steps.add(q, new)
                newest[q] = (*newest[q], *new)[-64:]
            started = clock.real()
            made = {q: msgspec.structs.replace(r, step=job.number, steps=newest[q]) for q, r in job.ranks.items()}
            s = Snapshot(t_s=t_s, world_size=ranks, expected=8, ranks=made, groups={})
            writer.add(steps.rows(ranks, t_s, s))
            rows = rank_rows(s, {}, [], windows, steps.slowest)
            writer.add(rows)
            writer.frame(t_s, State.RUNNING, "", rows)
            writer.add([CollectiveRow(pgroup="default_pg", seq=job.number, op="all_reduce", t_s=t_s, step=job.number)])
            assert writer.commit(), writer.last_error
            spent += clock.real() - started
            if k % max(1, polls // 12) == 0:
                con = sqlite3.connect(writer.path)
                counts = [
                    con.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("step", "step_minute", "frame")
                ]
                size = database_bytes(con)
                con.close()
                per_poll_ms = spent / max(1, polls // 12) * 1e3
                out.append((t_s / 3600, resident_bytes() / 2**20, size / 2**20, per_poll_ms, *counts))
                spent = 0.0
                print(*(f"{x:10.1f}" for x in out[-1]), flush=True)
        assert writer.dropped_rows == 0
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--step", type=float, default=4.0)
    parser.add_argument("--keep", type=int, default=256, help="bound of run.db, MiB")
    o = parser.parse_args()
    course = day(o.ranks, o.hours, o.step, o.keep << 20)
    machine = (
        f"{os.cpu_count()} shared cores ({platform.machine()}, {platform.system()}), Python {platform.python_version()}"
    )
    RESULT.write_text(
        f"# run.db over {o.hours:g} hours of {o.ranks:,} ranks\n\n"
        f"`python benchmarks/day.py --ranks {o.ranks} --hours {o.hours:g} --step {o.step:g} --keep {o.keep}` on {machine}, load {os.getloadavg()[0]:.0f}; n = 1.\n\n"
        f"{course[-1][0] * 3600 / o.step:,.0f} steps of {o.step:g} s; only the clock is faked. Memory is this process's resident set.\n\n"
        "| hour | resident MiB | run.db, MiB | ms per poll, mean since the row before | rows of steps | of minutes | frames |\n|---|---|---|---|---|---|---|\n"
        + "".join(f"| {h:.0f} | {m:.0f} | {d:.0f} | {p:.0f} | {n:,} | {minutes:,} | {f:,} |\n" for h, m, d, p, n, minutes, f in course)
    )  # fmt: skip
    most = max(size for _, _, size, *_ in course)
    assert most <= SPARE * o.keep, f"run.db reached {most:.0f} MiB of {o.keep} MiB"
    quarter, last = course[len(course) // 4][1], course[-1][1]
    assert last - quarter <= GROWTH_MIB, f"memory grew from {quarter:.0f} to {last:.0f} MiB"


if __name__ == "__main__":
    main()
