"""Compares exposed communication in run.db with the same job with and without communication, and measures the cost of reading it.

Every second step runs under `no_sync`. Truth: how much longer the backward of a step that DDP timed takes than that of the six
steps without communication around it. Claim: its `exposed_ms`. Two cases: one bucket, so that nothing overlaps; and small buckets,
where communication also takes CPU time from computation, so the truth is more than the exposed time. Gradients are views of
their buckets: copies into buckets take time, too, and are not communication. Columns: truth and claim in ms, and their ratio (claim / truth).

Usage: python benchmarks/ddp_times.py [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distdiag.store.liveness import Monitor
from distdiag.store.reader import open_run

JOB = """
import contextlib, json, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

steps, cap_mb, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))), bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
x = torch.randn(16, 512)
backward = {"sync": [], "alone": []}
for step in range(2 * steps):
    alone = step % 2 == 1
    with model.no_sync() if alone else contextlib.nullcontext():
        loss = model(x).square().mean()
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        backward["alone" if alone else "sync"].append((time.perf_counter() - began) * 1e3)
    optimizer.step()
    optimizer.zero_grad()
open(f"{out}.{dist.get_rank()}", "w").write(json.dumps(backward))
dist.barrier()
dist.destroy_process_group()
"""


def measure(steps: int, cap_mb: int) -> list[tuple[float, float]]:
    """Return (truth, claim) in ms for each of two ranks."""
    with tempfile.TemporaryDirectory() as made:
        script, out, path = Path(made, "job.py"), Path(made, "times"), Path(made, "run")
        script.write_text(JOB)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        job = ["-m", "distdiag.run", "--run-dir", str(path), str(script), str(steps), str(cap_mb), str(out)]
        subprocess.run([*launch, *job], check=True, capture_output=True, timeout=600)
        found = []
        with open_run(path) as run:
            while run.monitor() is Monitor.LIVE:
                time.sleep(0.1)
            rows = [r for r in run.steps(11, 2 * steps) if r.exposed_ms is not None]
        for rank in (0, 1):
            times = json.loads(Path(f"{out}.{rank}").read_text())
            timed = {(r.step - 1) // 2: r.exposed_ms for r in rows if r.rank == rank and r.exposed_ms is not None}
            added = [times["sync"][i] - statistics.median(times["alone"][max(0, i - 3) : i + 3]) for i in timed]
            found.append((statistics.median(added), statistics.median(timed.values())))
        return found


def read_cost_us(cold: bool, n: int = 200) -> float:
    """Return the median time of one read of the reducer's results, µs; cold: after touching 60 MiB of other memory."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(60)))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    for _ in range(12):
        model(torch.randn(2, 4)).sum().backward()
    other, times = bytearray(60 << 20), []
    for _ in range(n):
        if cold:
            other[::64] = bytes(len(other) // 64)
        began = time.perf_counter_ns()
        model._get_ddp_logging_data()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=200, help="synchronised steps, and the same number without synchronisation"
    )
    given = parser.parse_args()
    print(
        f"one read: {read_cost_us(False):.0f} µs, with cold caches {read_cost_us(True):.0f} µs (medians, n = 200)",
        flush=True,
    )
    for cap_mb, name in ((1000, "one bucket"), (2, "buckets of 2 MiB")):
        ratios = []
        for _ in range(given.rounds):
            for truth, claim in measure(given.steps, cap_mb):
                ratios.append(claim / truth)
                print(f"{name}: truth {truth:.2f} ms, exposed_ms {claim:.2f} ms, ratio {claim / truth:.3f}", flush=True)
        if ratios:
            print(
                f"{name}: median ratio {statistics.median(ratios):.3f}, {min(ratios):.3f}-{max(ratios):.3f}, n = {len(ratios)}"
            )


if __name__ == "__main__":
    main()
