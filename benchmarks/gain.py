"""Compares the gain that a straggler finding predicts with the real gain: a known delay is added and removed again.

    python benchmarks/gain.py [--trials 20]

Each trial is one job of two to four ranks, with its own random numbers. In every other block of 20 steps rank 1 is delayed by 3 to
30 ms; steps take about 25 ms. The prediction is computed from the delayed blocks alone; the truth is how much less the other blocks
take. Blocks are short, so that both see the same load of the machine. Columns: prediction with its interval, and truth, as shares of
the delayed step time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distdiag.diagnosis.comparison import gain
from distdiag.diagnosis.model.snapshot import Step
from distdiag.diagnosis.step_times import Window
from distdiag.store.liveness import Monitor
from distdiag.store.reader import open_run

BLOCK, PAIRS, WARM_UP, SETTLE = 20, 10, 10, 3
JOB = f"""
import random, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

delay_s, seed = float(sys.argv[1]) / 1e3, int(sys.argv[2])
dist.init_process_group("gloo")
torch.set_num_threads(1)
rng = random.Random(1000 * seed + dist.get_rank())

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
    def forward(self, x):
        time.sleep(rng.gauss(0.020, 0.002))
        return self.layer(x)

model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
for step in range({WARM_UP} + {2 * BLOCK * PAIRS}):
    delayed = (step - {WARM_UP}) // {BLOCK} % 2 == 0
    if delayed and dist.get_rank() == 1:
        time.sleep(max(0.0, rng.gauss(delay_s, delay_s / 10)))
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""


def steps_of(path: Path, ranks: int) -> dict[int, dict[int, Step]]:
    """Return the recorded steps by rank and number."""
    found: dict[int, dict[int, Step]] = {r: {} for r in range(ranks)}
    with open_run(path) as run:
        while run.monitor() is Monitor.LIVE:
            time.sleep(0.1)
        for x in run.steps(WARM_UP + 1, WARM_UP + 2 * BLOCK * PAIRS):
            found[x.rank][x.step] = Step(
                x.step, 0.0, x.step_ms or 0.0, 0.0, 0.0, 0.0, 0.0, x.wait_ms or 0.0, 0.0, None, 0, 0, None
            )
    return found


def trial(delay_ms: float, ranks: int, seed: int) -> tuple[float, float, float, float]:
    """Return (prediction, its low end, its high end, truth), shares of the delayed step time."""
    with tempfile.TemporaryDirectory() as made:
        script, path = Path(made, "job.py"), Path(made, "run")
        script.write_text(JOB)
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        job = ["-m", "distdiag.run", "--run-dir", str(path), str(script), str(delay_ms), str(seed)]
        subprocess.run([*launch, *job], check=True, capture_output=True, timeout=600)
        steps = steps_of(path, ranks)
    on, off = [], []
    for step in sorted(set.intersection(*(set(of) for of in steps.values()))):
        place = (step - 1 - WARM_UP) % (2 * BLOCK)
        if place % BLOCK >= SETTLE:
            (on if place < BLOCK else off).append(step)
    found = gain(Window({r: [of[i] for i in on] for r, of in steps.items()}), [1])
    assert found is not None
    mean = [statistics.mean(max(of[i].step_ms for of in steps.values()) for i in part) for part in (on, off)]
    return found.share, found.low, found.high, 1 - mean[1] / mean[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=20)
    given = parser.parse_args()
    rng, held, errors, widths = random.Random(1), 0, [], []
    for n in range(given.trials):
        delay_ms, ranks = rng.uniform(3, 30), (2, 2, 3, 4)[n % 4]
        share, low, high, truth = trial(delay_ms, ranks, n + 1)
        held += low <= truth <= high
        errors.append(share - truth)
        widths.append((high - low) / 2)
        print(
            f"{ranks} ranks, +{delay_ms:.1f} ms: predicted {share:.1%} ({low:.1%} to {high:.1%}), true {truth:.1%}"
            f"{'' if low <= truth <= high else '  outside'}",
            flush=True,
        )
    print(
        f"the interval contains the truth in {held} of {given.trials}; mean error {statistics.mean(errors):+.2%}, "
        f"median half width {statistics.median(widths):.2%}; load {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
