"""Measures the monitor's CPU for one poll of a job of 1,024 ranks: every rule on one snapshot, healthy and deadlocked.

    python benchmarks/diagnosis.py [--ranks 1024] [--polls 80]

Each rank has 64 steps, 32 calls, a loader and a DDP model; every poll differs from the one before, as in a real job. Output: CPU
milliseconds of `Diagnosis.update`, median over polls with a 95 % bootstrap interval. Polls are a quarter of a second of the job apart;
the rules on speed and data run at every fourth poll, and those polls are listed separately.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.snapshot import Call, Group, Loader, Model, RankState, Site, Snapshot, Step
from distdiag.terms.statistics import interval_of_median

RESULTS = Path(__file__).parent / "results"
ALLOWED_MS = 50.0
LOOP, SAVE = Site("/job/train.py", 40, "main"), Site("/job/train.py", 52, "save")
MODEL = Model(group="default_pg", parameters=60, find_unused=False, forwards=99, synced_backwards=99, unused_checks=99)
LOADER = Loader(site=LOOP, length=1000, batches=99, batch_size=32, in_training=True)


def call(op: str, seq: int, site: Site, done: bool) -> Call:
    return Call(
        op=op, group="default_pg", seq=seq, dtype="float32", shape=(1024,), bytes=4096, site=site,
        entered_s=seq * 0.1, completed_s=seq * 0.1 + 0.02 if done else None,
    )  # fmt: skip


def rank(q: int, poll: int, what: str) -> RankState:
    """Return a rank that computes; or of which rank 0 is late in every step; or rank 0 is alone in a barrier, the others in all_reduce."""
    deadlocked = what == "deadlocked"
    r = random.Random(q)
    last = 96 if deadlocked else 96 + poll
    blocked = None
    if deadlocked:
        blocked = call("barrier" if q == 0 else "all_reduce", last + 1, SAVE if q == 0 else LOOP, done=False)
    is_late = what == "straggler" and q == 0
    late = 29.0 if is_late else r.uniform(0, 1)
    steps = tuple(
        Step(
            k, k * 0.1 + 0.09, 100.0, 2.0, r.uniform(19, 21) + late, r.uniform(39, 41), 5.0, 30.0 - late, 3.0,
            k * 0.1 + 0.05 + late / 1e3, 32, 32, 1.0,
        )
        for k in range(last - 63, last + 1)
    )  # fmt: skip
    calls = tuple(call("all_reduce", k, LOOP, done=True) for k in range(last - 31, last + 1))
    sites = {"/job/train.py:40": last, **({"/job/train.py:52": 1} if deadlocked and q == 0 else {})}
    return RankState(
        rank=q, current_site=LOOP, user_stack=(LOOP,), step=last, steps=steps, blocked=blocked, host_blocked=deadlocked,
        calls=(*calls, blocked) if blocked else calls, sites=sites, enqueued={"default_pg": last + deadlocked},
        completed={"default_pg": last}, models=(MODEL,), loaders=(LOADER,),
    )  # fmt: skip


def measure(ranks: int, polls: int, what: str) -> list[float]:
    """Return the CPU milliseconds of each poll; the first one, which fills caches, is not counted."""
    diagnosis = Diagnosis(source=lambda _: None)
    group = {"default_pg": Group(name="default_pg", ranks=tuple(range(ranks)), backend="gloo")}
    out = []
    for poll in range(polls + 1):
        states = {q: rank(q, poll, what) for q in range(ranks)}
        s = Snapshot(t_s=10.0 + poll / 4, world_size=ranks, ranks=states, groups=group, usual_step_s=0.1)
        began = time.process_time()
        diagnosis.update(s)
        out.append((time.process_time() - began) * 1e3)
    found = [(f.kind, f.culprits) for f in diagnosis.findings]
    if found != {"healthy": [], "straggler": [("straggler", (0,))], "deadlocked": [("deadlock", (0,))]}[what]:
        sys.exit(f"not what it should say: {found}")
    return out[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--polls", type=int, default=80)
    o = parser.parse_args()
    where = f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()}), Python {platform.python_version()}"
    lines = [
        "# What one poll of a job costs the monitor",
        "",
        f"`python benchmarks/diagnosis.py --ranks {o.ranks} --polls {o.polls}` on {where}.",
        "",
        "| job | median CPU ms | 95 % interval | slowest | n | allowed |",
        "|---|---|---|---|---|---|",
    ]
    worst = 0.0
    for what in ("healthy", "straggler", "deadlocked"):
        values = measure(o.ranks, o.polls, what)
        for name, some in (
            ("most polls", [v for i, v in enumerate(values) if i % 4 != 3]),
            ("every fourth", values[3::4]),
        ):
            of_median = interval_of_median(np.asarray(some))
            worst = max(worst, of_median.low)
            lines.append(
                f"| {o.ranks:,} ranks, {what}, {name} | {statistics.median(some):.1f} | {of_median.low:.1f} – {of_median.high:.1f} | {max(some):.1f} "
                f"| {len(some)} polls | {ALLOWED_MS:.0f} |"
            )
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "diagnosis.md").write_text(text)
    print(text)
    return 0 if worst <= ALLOWED_MS else 1


if __name__ == "__main__":
    sys.exit(main())
