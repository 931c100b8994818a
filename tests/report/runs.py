"""Synthetic runs, written by the store's own writer, so that reports read what the monitor would have written."""

from __future__ import annotations

import random
from pathlib import Path

from distdiag.diagnosis.model.findings import CollectiveRef, Finding, Where
from distdiag.report.facts import RunFacts, read_facts
from distdiag.store.frames import RankRow
from distdiag.store.reader import open_run
from distdiag.store.rows import CollectiveRow, GpuRow, GroupRow, HostRow, LoaderRow, StepRow
from distdiag.store.rundir import write_run_json
from distdiag.store.writer import Writer

DEADLOCK = Finding(
    kind="deadlock", cause="missing_rank", certainty="proved", severity="error", culprits=(1,), victims=(0, 2, 3),
    collective=CollectiveRef("all_reduce", "default_pg", 417, 4096),
    where=(Where(1, "/home/me/train.py", 88, "evaluate", "user_code"),),
    waiting=(Where(0, "/home/me/train.py", 91, "main"),),
    step=120, first_seen_s=41.2, detected_s=42.6,
    message="rank 1 has not entered all_reduce #417 (default_pg, 4.0 KiB); ranks 0, 2, 3 wait for it",
    cost="the job makes no progress", advice="make every rank enter it", evidence=("stacks/42.json",),
)  # fmt: skip
STRAGGLER = Finding(
    kind="straggler", cause="data", severity="warning", culprits=(2,), first_seen_s=10.0, detected_s=12.0,
    cleared_s=30.0, step=40, message="rank 2  data +62 ms/step, slowest in 46 of the last 50 steps",
    cost="27 % of step time", advice="check storage on node0",
)  # fmt: skip


def make_run(
    path: Path,
    *,
    ranks: int = 4,
    steps: int = 120,
    step_ms: float = 100.0,
    noise: float = 0.02,
    slow_rank: int | None = None,
    slow_ms: float = 20.0,
    findings: tuple[Finding, ...] = (),
    name: str = "cifar",
    host: str = "node0",
    command: str = "torchrun train.py",
    gpus: bool = False,
    state: str = "ended",
    samples: int = 32,
    seed: int = 0,
    exception: str | None = None,
    first_step_ms: float | None = None,
    torch: str = "2.13.0",
) -> Path:
    """Make a run of `ranks` synchronous ranks; `slow_rank` needs `slow_ms` more for its data and the others wait.

    The step time is `step_ms` (the slow rank's excess included on top) with relative normal noise of `noise`.
    """
    rng = random.Random(seed)
    with Writer(path) as w:
        w.meta(
            checks="[]",
            name=name, world_size=ranks, backend="gloo", started_unix_s=1_700_000_000.0, torch=torch,
            distdiag="0.1.0", command=command, state=state, ended_s=steps * step_ms / 1e3 + 1, monitor_ended=1, model="SimpleCNN",
        )  # fmt: skip
        t = 0.0
        last: list[StepRow] = []
        for step in range(1, steps + 1):
            work = max(step_ms * (1 + rng.gauss(0, noise)), 0.1)
            if step == 1 and first_step_ms is not None:
                work = first_step_ms
            total = work + (slow_ms if slow_rank is not None else 0.0)
            t += total / 1e3
            last = []
            for r in range(ranks):
                slow = slow_ms if r == slow_rank else 0.0
                wait = 0.05 * work + (total - work - slow)
                last.append(
                    StepRow(
                        rank=r, step=step, epoch=0, t_end_s=t, step_ms=total, data_ms=0.1 * work + slow, h2d_ms=None,
                        forward_ms=0.3 * work, backward_ms=0.5 * work + (total - work - slow), optimizer_ms=0.1 * work,
                        other_ms=0.0, wait_ms=wait, self_ms=total - wait, late_ms=slow, samples=samples,
                        loss=2.3 / step, rss_bytes=500 * 2**20 + r,
                    )
                )  # fmt: skip
            w.add(last)
            for bucket in range(2):
                w.add(
                    [
                        CollectiveRow(
                            pgroup="default_pg", seq=2 * step + bucket, op="all_reduce", dtype="float32",
                            bytes=2**20, ranks=ranks, t_s=t - 0.01, duration_us=1000.0, skew_us=slow_ms * 1e3 if slow_rank is not None else 100.0,
                            late_rank=slow_rank if slow_rank is not None else step % ranks, step=step,
                        )
                    ]
                )  # fmt: skip
        rows = [
            RankRow(
                rank=r, host=host, pid=1000 + r, life="finished" if state == "ended" else "running", step=steps,
                phase="done", file="/home/me/train.py", line=91, function="main", rss_bytes=500 * 2**20,
                exception=exception if r == 0 else None, gpu=r if gpus else None,
            )
            for r in range(ranks)
        ]  # fmt: skip
        w.add(rows)
        w.frame(t, state, "", rows)
        w.groups([GroupRow(name="default_pg", ranks=tuple(range(ranks)), backend="gloo")])
        for second in range(3):
            w.add(
                [
                    HostRow(
                        t_s=float(second), host=host, cpu_pct=50.0, load1=2.0, cores=8, memory_used_bytes=(second + 1) * 2**30,
                        memory_total_bytes=2**34, disk_read_bytes_per_s=1e6, net_sent_bytes_per_s=None,
                    )
                ]
            )  # fmt: skip
            if gpus:
                w.add(
                    [
                        GpuRow(
                            t_s=float(second), node=0, gpu=g, name="NVIDIA H100", rank=g, utilization_pct=90.0,
                            memory_used_bytes=2**33, memory_total_bytes=80 * 2**30, power_w=400.0, temperature_c=60.0 + second,
                            throttle="SW thermal" if second == 2 else "", pcie_generation=4, pcie_generation_max=5,
                            pcie_width=8, pcie_width_max=16,
                        )
                        for g in range(ranks)
                    ]
                )  # fmt: skip
        w.add([LoaderRow(rank=0, file="/home/me/train.py", line=40, length=100, batch_size=samples, workers=2,
                             drop_last=True, distributed_sampler=False)])  # fmt: skip
        w.event(1.0, "monitor", "warning", "no NVIDIA driver")
        w.probe(2.0, "allreduce", "pass", "{}")
        for f in findings:
            w.finding(f)
    write_run_json(path, {"versions": {"torch": torch, "python": "3.11.7"}})
    return path


def facts_of(path: Path) -> RunFacts:
    with open_run(path) as run:
        return read_facts(run)
