"""Measures the cost of recording a training step: plain and recorded steps interleaved in one run on two ranks, as a ratio.

    python benchmarks/overhead.py [--rounds 100] [--steps-per-round 40] [--batch 24] [--backend stream]

Steps are plain (hooks off, pulse silent) or recorded (hooks and pulse), in pairs of random order that is equal on both ranks, so
that load of neighbours on the host affects both equally. Hooks are switched by swapping the hooked methods of torch's classes
for the originals and back: everything else (process, memory, caches) is the same. The monitor runs all the time, on the cores that
the ranks keep busy. Pairs begin when it is two minutes old, since until then it polls more often: its cost before that is a separate
line.

Hooks and pulse: the median over all pairs of the ratio of their steps. Their cost in any single step is far less than the variation
between steps, so the median follows its mean and not the few steps that a neighbour stretched. In wall time, and in CPU time of
the whole process, which excludes waits for the other rank. A second run puts timers around every hook, minus torch's time inside, and
around the pulse, minus what the same timers show around no hooks. This is the most precise value, and an upper bound, because
cache lines that a hook loads also serve torch's own code after it.

The monitor takes milliseconds from few steps, plain or recorded. A step in which the monitor polled is compared with the steps around
it, and the same for steps at random times (long steps are hit more often by either). The difference shows how much a step waits for
each millisecond of the monitor's CPU; multiplied by its CPU, this is its cost. The total is the sum of both.

All values have a 95 % bootstrap interval over rounds (a round is one sample: its ranks wait for each other).

The hooks alone are measured twice, in CPU microseconds per step: called one after another with no model between them, and as their
addition to the step of a model of one weight, where the caches are full of torch's own code before each hook.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests`
RESULTS, JOB = Path(__file__).parent / "results", Path(__file__).with_name("_overhead_job.py")
JOBS = Path(__file__).resolve().parents[1] / "tests/faults/manifest.json"  # next to the backends
ALLOWED_RATIO, ALLOWED_HOOKS_US, ALLOWED_BYTES = 1.005, 30.0, 8 << 20
POLL_CPU_S = 1.5e-3  # monitor's CPU in one step from which on it was a full poll


def interval(
    rounds: list[list[float]], center: Callable[..., Any] | None = None, draws: int = 4000
) -> tuple[float, float, float]:
    """Return (median or another centre, low, high) of all values: bootstrap over rounds, 95 %."""
    import numpy as np

    center = center or np.median
    r = np.random.default_rng(0)
    values = np.asarray(rounds)
    centers = [center(values[r.integers(0, len(values), len(values))]) for _ in range(draws)]
    low, high = np.quantile(centers, (0.025, 0.975))
    return float(center(values)), float(low), float(high)


def _launch(kind: str, rounds: int, steps: int, batch: int, backend: str = "gloo") -> list[Any]:
    """Return what each rank measured."""
    from tests.faults.collection import backend_environment

    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DISTDIAG_RUN_DIR": f"{folder}/run", "DISTDIAG_QUIET": "1"}
        env |= backend_environment(JOBS, backend)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, kind,
             str(rounds), str(steps), str(batch)],
            env=env, capture_output=True, text=True, timeout=3600, check=False,
        )  # fmt: skip
        time.sleep(1.5)  # the monitor writes its last rows
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        sys.exit(f"the job did not end well:\n{done.stdout[-500:]}\n{done.stderr[:3000]}")
    return json.loads(line[7:])


def _poll_delays(steps: Any, rng: Any) -> tuple[list[float], list[float], list[float]]:
    """Return the delays of one round of (wall, monitor's CPU) steps, in seconds: how much longer than their neighbours steps with a poll
    were, the CPU that the monitor used more than in others, and how much longer steps at random times were."""
    import numpy as np

    wall, cpu = steps[:, 0], steps[:, 1]
    polls = np.flatnonzero(cpu > POLL_CPU_S)

    def longer(i: int) -> float:
        around = [j for j in range(max(0, i - 4), min(len(wall), i + 5)) if j != i and cpu[j] <= POLL_CPU_S]
        return float(wall[i] - np.median(wall[around]))

    at = np.searchsorted(np.cumsum(wall), rng.uniform(0, wall.sum(), 40))
    other = [int(i) for i in at if i < len(wall) and cpu[i] <= POLL_CPU_S]
    usual = float(np.median(cpu))
    return [longer(int(i)) for i in polls], [float(cpu[i]) - usual for i in polls], [longer(i) for i in other]


def _delay_per_cpu_s(rounds: list[tuple[list[float], list[float], list[float]]]) -> float:
    """Return the seconds that a step waits for each second of the monitor's CPU; means without the outer tenths."""
    import numpy as np

    def trimmed(parts: list[list[float]]) -> float:
        values = np.sort(np.concatenate([np.asarray(p) for p in parts]))
        cut = len(values) // 10
        return float(values[cut : len(values) - cut].mean()) if len(values) else float("nan")

    delays, cpu, others = (list(part) for part in zip(*rounds, strict=True))
    return (trimmed(delays) - trimmed(others)) / trimmed(cpu)


def main() -> int:
    import numpy as np  # not in the ranks: their memory is measured

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of pairs (default 100)")
    parser.add_argument("--steps-per-round", type=int, default=40, help="pairs of steps in a round (default 40)")
    parser.add_argument(
        "--batch", type=int, default=24, help="images per rank and step, which set the length of a step (default 24)"
    )
    parser.add_argument(
        "--backend", default="gloo", help="backend of the ranks: gloo (default), or stream, which behaves like NCCL"
    )
    o = parser.parse_args()
    ranks = _launch("steps", o.rounds, o.steps_per_round, o.batch, o.backend)
    # rank, round, step, (recorded, wall, CPU, the monitor's CPU)
    steps = np.asarray([r[0] for r in ranks])
    rounds = steps.shape[1]
    by_arm = [steps[steps[..., 0] == arm].reshape(len(ranks), rounds, -1, 4)[..., 1:3].mean(0) for arm in (0, 1)]
    plain, recorded_s = by_arm  # round, step, (wall, CPU): the mean of the ranks
    ratios = recorded_s / plain
    monitored = np.stack([steps[..., 1].mean(0), steps[0, ..., 3]], axis=-1)  # round, step, (wall, the monitor's CPU)
    step_ms = float(np.median(plain[..., 0])) * 1e3
    recorded, recorded_low, recorded_high = interval(ratios[..., 0].tolist())
    by_cpu, by_cpu_low, by_cpu_high = interval(ratios[..., 1].tolist())
    shares = monitored[..., 1].sum(1) / monitored[..., 0].sum(1)
    share, share_low, share_high = (100 * v for v in interval([[v] for v in shares], center=np.mean))
    young = [100 * (b - a) / (t - s) for (s, a), (t, b) in pairwise(ranks[0][4])]
    rng = np.random.default_rng(0)
    polls = [_poll_delays(block, rng) for block in monitored]
    n_polls = sum(len(d) for d, *_ in polls)

    def monitor_and_total(chosen: Any) -> tuple[float, float]:
        taken = _delay_per_cpu_s([polls[i] for i in chosen]) * float(shares[chosen].mean())
        return taken, float(np.median(ratios[chosen, :, 0])) * (1 + taken)

    drawn = np.asarray([monitor_and_total(rng.integers(0, rounds, rounds)) for _ in range(4000)])
    (by_monitor, total), (lows, highs) = (
        monitor_and_total(np.arange(rounds)),
        np.nanquantile(drawn, (0.025, 0.975), axis=0),  # a short run draws rounds without a single poll, too
    )
    memory = max(m for _, m, *_ in ranks)
    by_clocks = np.asarray(_launch("clocks", max(20, o.rounds // 2), 10, o.batch, o.backend))
    taken, taken_low, taken_high = interval((by_clocks[..., 0] / by_clocks[..., 1]).T.tolist())
    taken_us = float(np.median(by_clocks[..., 0])) / 1e3
    alone = _launch("hooks", 4, 20, 4, o.backend)
    hooks, in_step = ([v for r in alone for v in r[i]] for i in (2, 3))
    hook, hook_low, hook_high = interval([[v] for v in hooks])
    added, added_low, added_high = interval([[v] for v in in_step])
    passed = {
        "recorded": recorded <= ALLOWED_RATIO,
        "by_cpu": by_cpu <= ALLOWED_RATIO,
        "taken": taken <= ALLOWED_RATIO - 1,
        "total": total <= ALLOWED_RATIO,
        "hooks": hook_low <= ALLOWED_HOOKS_US,
        "memory": memory <= ALLOWED_BYTES,
    }
    text = f"""# What recording costs

`python benchmarks/overhead.py --rounds {o.rounds} --steps-per-round {o.steps_per_round} --batch {o.batch} --backend {o.backend}` on {os.cpu_count()} cores
({platform.machine()}, {platform.system()}, no GPU), two ranks; plain and recorded steps in turns, in one run.

| what | estimate | 95 % interval | n | allowed |
|---|---|---|---|---|
| hooks, pulse and monitor: monitored / plain step ({step_ms:.0f} ms), no core to spare | {total:.4f} | {lows[1]:.4f} – {highs[1]:.4f} | {rounds} rounds | {ALLOWED_RATIO} |
| of that, hooks and pulse: recorded / plain step | {recorded:.4f} | {recorded_low:.4f} – {recorded_high:.4f} | {ratios[..., 0].size:,} pairs | {ALLOWED_RATIO} |
| of that, the monitor: its polls, share of a step | {by_monitor:.2%} | {lows[0]:.2%} – {highs[0]:.2%} | {n_polls} polls | – |
| hooks and pulse in CPU time: recorded / plain step | {by_cpu:.4f} | {by_cpu_low:.4f} – {by_cpu_high:.4f} | {ratios[..., 0].size:,} pairs | {ALLOWED_RATIO} |
| hooks and pulse by timers around them (an upper bound), share of a step | {taken:.2%} ({taken_us:.0f} µs) | {taken_low:.2%} – {taken_high:.2%} | {by_clocks[..., 0].size} blocks | {ALLOWED_RATIO - 1:.1%} |
| the monitor, of one core | {share:.2f} % | {share_low:.2f} – {share_high:.2f} % | {rounds} rounds | – |
| the same in its first half minute, and from then to two minutes | {young[0]:.2f} %, {young[1]:.2f} % | – | 1 run | – |
| hooks alone, no model between them, CPU per step | {hook:.1f} µs | {hook_low:.1f} – {hook_high:.1f} µs | {len(hooks)} blocks | {ALLOWED_HOOKS_US:.0f} µs |
| the same, as added to a step of a model of one weight | {added:.1f} µs | {added_low:.1f} – {added_high:.1f} µs | {len(in_step)} blocks | – |
| extra memory of a rank at attach | {memory / 2**20:.1f} MiB | – | {len(ranks)} ranks | {ALLOWED_BYTES / 2**20:.0f} MiB |
"""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / ("overhead.md" if o.backend == "gloo" else f"overhead-{o.backend}.md")).write_text(text)
    print(text)
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
