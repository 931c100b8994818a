"""Measures the gain of `no_sync`: gradients of accumulated batches exchanged once per step, or after every batch, on a limited link.

    python benchmarks/accumulation.py                    # two gloo ranks; link unlimited, 1 Gbit/s and 200 Mbit/s
    python benchmarks/accumulation.py --rates 100mbit --accumulate 8

The ranks run in their own network namespace, whose loopback device is limited by tc's token bucket. That needs no root if the
kernel allows user namespaces (`unshare -Urn`). Both directions share the rate. The two variants alternate step by step in one
job. Columns: link rate, milliseconds per step of each variant, and their ratio. Writes benchmarks/results/accumulation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accumulation.md"
BATCH = 16
RATES = "none,1gbit,200mbit"
LIMIT_S = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default=RATES, help="rates of the link in tc's notation; none: not limited")
    parser.add_argument("--accumulate", type=int, default=4, help="batches per optimizer step")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each variant")
    parser.add_argument("--rank", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return measure(Path(options.rank), options.accumulate, options.rounds)
    about = (
        f"Two gloo ranks, SimpleCNN (2.5 M parameters), {options.accumulate} batches of {BATCH} per rank and step; "
        f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores. Medians with 95 % intervals."
    )
    lines = [
        about,
        "",
        "| link | exchanged once, ms per step | after every batch, ms per step | ratio (95 % interval) | n |",
        "|---|---|---|---|---|",
    ]
    for rate in options.rates.split(","):
        lines.append(row(rate, options))
        print(lines[-1], flush=True)
    command = " ".join(["python", f"benchmarks/{HERE.name}", *sys.argv[1:]])
    RESULTS.write_text(f"# `{command}`\n\n" + "\n".join(lines) + "\n")
    print(f"written: {RESULTS}")
    return 0


def row(rate: str, options: argparse.Namespace) -> str:
    """Run the job on a link of `rate`; return its row of the table."""
    sys.path.insert(0, str(ROOT))
    import numpy as np

    from distdiag.terms.statistics import interval_of_median, interval_of_rounds

    with tempfile.TemporaryDirectory(prefix="accumulation-") as made:
        out = Path(made) / "times.json"
        limit = f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 400ms && " if rate != "none" else ""
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
        words += ["--master-port", "29650", str(HERE), "--rank", str(out), "--accumulate", str(options.accumulate)]
        words += ["--rounds", str(options.rounds)]
        inside = f"ip link set lo up && {limit}exec {shlex.join(words)}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        subprocess.run(["unshare", "-Urn", "bash", "-c", inside], env=env, check=True, timeout=LIMIT_S)
        once, always = (np.array(times) for times in json.loads(out.read_text()))
    ratios = (always / once).tolist()
    interval = interval_of_rounds(ratios)
    cells = []
    for times in (once, always):
        spread = interval_of_median(times)
        cells.append(f"{np.median(times):,.0f} ({spread.low:,.0f}–{spread.high:,.0f})")
    ratio = float(np.exp(np.mean(np.log(ratios))))
    name = "loopback" if rate == "none" else rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
    return (
        f"| {name} | {cells[0]} | {cells[1]} | {ratio:.2f} ({interval.low:.2f}–{interval.high:.2f}) | {len(ratios)} |"
    )


def measure(out: Path, accumulate: int, rounds: int) -> int:
    """Train on this rank, alternating both variants; rank 0 writes the milliseconds of their steps."""
    import torch

    from distdiag.train.__main__ import leave
    from distdiag.train.config import TrainConfig
    from distdiag.train.faults import Faults
    from distdiag.train.models import SimpleCNN
    from distdiag.train.ranks import join_ranks
    from distdiag.train.strategies import build_strategy
    from distdiag.train.strategies.base import Setup

    torch.set_num_threads(1)
    config = TrainConfig(strategy="ddp", batch_size=BATCH, accumulate=accumulate, device="cpu")
    ranks = join_ranks(config)
    strategy = build_strategy(Setup(config, ranks, SimpleCNN(), "off", Faults((), ranks.rank, 2)))
    optimizer = torch.optim.SGD(strategy.network.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.rand(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step(every_batch: bool) -> float:
        ranks.barrier()
        begin = time.perf_counter()
        for i in range(accumulate):
            strategy.backward(images, labels, completes_step=every_batch or i == accumulate - 1)
        strategy.optimize(optimizer)
        return (time.perf_counter() - begin) * 1e3

    for every_batch in (True, False, True):  # DDP rebuilds its buckets after the first step
        step(every_batch)
    once, always = [], []
    for i in range(rounds):
        for every_batch in (i % 2 == 0, i % 2 == 1):
            (always if every_batch else once).append(step(every_batch))
    if ranks.rank == 0:
        out.write_text(json.dumps([once, always]))
    ranks.leave()
    leave(0)


if __name__ == "__main__":
    sys.exit(main())
