"""What recording costs a training step: plain and recorded steps interleaved in one run on two ranks, as a ratio.

    python benchmarks/overhead.py [--rounds 60] [--steps-per-round 20]

Each round has two blocks, in random order alike on both ranks. In one, steps are plain (hooks off, pulse silent) and
recorded (hooks and pulse) in turns, in pairs of random order, while the monitor is stopped by SIGSTOP: what neighbours on
the host do meets both alike. In the other, all steps are recorded and the monitor runs, on the cores that the ranks keep
busy. Hooks are switched by swapping the hooked methods of torch's classes for the originals and back, so that everything
else (process, memory, caches) is the same.

The first figure is the median over all pairs of the ratio of their steps: what hooks and pulse take from any one step is
far less than steps differ by, so that the median moves with the mean of it and not with the few steps that a neighbour
stretched. The second is what they take directly, in a run of its own: clocks around every hook, less what torch does
inside, and around the pulse, as a share of the same steps, less what the same clocks show around no hooks in steps just
before or after; it is much the sharper of the two, but does not see what they do to the code around them. The monitor takes milliseconds from few steps, and so the third is the median over rounds of the
ratio of means. All have a 95 % bootstrap interval over rounds (a round is one sample: its ranks wait for each other).

The hooks alone are measured twice, in CPU microseconds a step: called one after the other with no model between them, and as
what they add to the step of a model of one weight, where the caches are full of torch's own code when a hook's turn comes.
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
from pathlib import Path
from typing import Any

RESULTS, JOB = Path(__file__).parent / "results", Path(__file__).with_name("_overhead_job.py")
ALLOWED_RATIO, ALLOWED_HOOKS_US, ALLOWED_BYTES = 1.005, 30.0, 8 << 20


def interval(
    rounds: list[list[float]], center: Callable[..., Any] | None = None, draws: int = 4000
) -> tuple[float, float, float]:
    """(median, or another center, low, high) of all values: bootstrap over rounds, 95 %."""
    import numpy as np

    center = center or np.median
    r = np.random.default_rng(0)
    values = np.asarray(rounds)
    centers = [center(values[r.integers(0, len(values), len(values))]) for _ in range(draws)]
    low, high = np.quantile(centers, (0.025, 0.975))
    return float(center(values)), float(low), float(high)


def _launch(kind: str, rounds: int, steps: int) -> list[Any]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DISTDIAG_RUN_DIR": f"{folder}/run", "DISTDIAG_QUIET": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, kind, str(rounds), str(steps)],
            env=env, capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip
        time.sleep(1.5)  # the monitor writes its last rows
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        sys.exit(f"the job did not end well:\n{done.stdout[-500:]}\n{done.stderr[:3000]}")
    return json.loads(line[7:])


def main() -> int:
    import numpy as np  # not in the ranks: their memory is measured

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of two blocks (default 60)")
    parser.add_argument("--steps-per-round", type=int, default=20, help="steps of each kind in a block (default 20)")
    o = parser.parse_args()
    ranks = _launch("steps", o.rounds, o.steps_per_round)
    # by round and step: the mean of the ranks
    plain, recorded_s, monitored_s = (
        np.asarray([[one_round[arm] for one_round in r[0]] for r in ranks]).mean(0) for arm in range(3)
    )
    rounds = len(plain)
    step_ms = float(np.median(plain)) * 1e3
    recorded, recorded_low, recorded_high = interval((recorded_s / plain).tolist())
    share, share_low, share_high = (100 * v for v in interval([[v] for v in ranks[0][4]], center=np.mean))
    ratio, low, high = interval((monitored_s.mean(1) / plain.mean(1))[:, None].tolist())
    memory = max(m for _, m, *_ in ranks)
    by_clocks = np.asarray(_launch("clocks", max(20, o.rounds // 2), 10))
    taken, taken_low, taken_high = interval((by_clocks[..., 0] / by_clocks[..., 1]).T.tolist())
    taken_us = float(np.median(by_clocks[..., 0])) / 1e3
    alone = _launch("hooks", 4, 20)
    hooks, in_step = ([v for r in alone for v in r[i]] for i in (2, 3))
    hook, hook_low, hook_high = interval([[v] for v in hooks])
    added, added_low, added_high = interval([[v] for v in in_step])
    passed = {
        "recorded": recorded_low <= ALLOWED_RATIO,
        "taken": taken <= ALLOWED_RATIO - 1,
        "ratio": low <= ALLOWED_RATIO,
        "hooks": hook_low <= ALLOWED_HOOKS_US,
        "memory": memory <= ALLOWED_BYTES,
    }
    text = f"""# What recording costs

`python benchmarks/overhead.py --rounds {o.rounds} --steps-per-round {o.steps_per_round}` on {os.cpu_count()} cores
({platform.machine()}, {platform.system()}, no GPU), two gloo ranks; plain and recorded steps in turns, blocks of monitored steps between them, in one run.

| what | median | 95 % interval | n | allowed |
|---|---|---|---|---|
| recorded / plain step ({step_ms:.0f} ms): hooks and pulse | {recorded:.4f} | {recorded_low:.4f} – {recorded_high:.4f} | {recorded_s.size:,} pairs | {ALLOWED_RATIO} |
| of that, directly: clocks around hooks and pulse, share of a step | {taken:.2%} ({taken_us:.0f} µs) | {taken_low:.2%} – {taken_high:.2%} | {by_clocks[..., 0].size} blocks | {ALLOWED_RATIO - 1:.1%} |
| monitored / plain step: the monitor, too, no core to spare | {ratio:.4f} | {low:.4f} – {high:.4f} | {rounds} rounds | {ALLOWED_RATIO} |
| the monitor, of one core, mean | {share:.2f} % | {share_low:.2f} – {share_high:.2f} % | {rounds} blocks | – |
| hooks alone, no model between them, CPU per step | {hook:.1f} µs | {hook_low:.1f} – {hook_high:.1f} µs | {len(hooks)} blocks | {ALLOWED_HOOKS_US:.0f} µs |
| the same, as added to a step of a model of one weight | {added:.1f} µs | {added_low:.1f} – {added_high:.1f} µs | {len(in_step)} blocks | – |
| extra memory of a rank at attach | {memory / 2**20:.1f} MiB | – | {len(ranks)} ranks | {ALLOWED_BYTES / 2**20:.0f} MiB |
"""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overhead.md").write_text(text)
    print(text)
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
