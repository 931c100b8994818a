"""Many small runs for `distdiag history`, written by the store's own writer."""

from __future__ import annotations

import json
from pathlib import Path

from distdiag.diagnosis.model.findings import Finding, Where
from distdiag.store.frames import RankRow
from distdiag.store.writer import Writer

TUESDAY = 1_795_478_400.0  # 2026-11-24, 00:00 UTC
DAY = 86_400.0
STRAGGLER = Finding(
    kind="straggler", cause="data", severity="warning", culprits=(2,), first_seen_s=9.0, message="rank 2 is late"
)


def hang(line: int) -> Finding:
    return Finding(
        kind="deadlock", cause="missing_rank", certainty="proved", severity="error", culprits=(1,), victims=(0, 2, 3),
        where=(Where(1, "/job/train.py", line, "evaluate", "user_code"),), first_seen_s=40.0, message="rank 1 is missing",
    )  # fmt: skip


def write_run(
    path: Path,
    started_unix_s: float,
    *,
    hosts: tuple[str, ...] = ("node0", "node1"),
    step_ms: float = 100.0,
    findings: tuple[Finding, ...] = (),
    bandwidth_gbps: float | None = None,
    name: str = "llama",
    state: str = "ended",
) -> Path:
    """Write a run of two ranks per host."""
    ranks = [
        RankRow(rank=q, node=q // 2, host=hosts[q // 2], life="finished", step=500, step_ms=step_ms, wait_ms=10.0)
        for q in range(2 * len(hosts))
    ]
    with Writer(path) as w:
        w.meta(
            checks="[]", started_unix_s=started_unix_s, name=name, world_size=len(ranks), state=state, ended_s=60.0,
            monitor_ended=1,
        )  # fmt: skip
        w.add(ranks)
        w.frame(59.0, state, "", ranks)
        for f in findings:
            w.finding(f)
        if bandwidth_gbps is not None:
            result = {"hosts": list(hosts), "rows": [{"busbw_gbps": 0.5}, {"busbw_gbps": bandwidth_gbps}]}
            w.probe(1.0, "allreduce", "pass", json.dumps(result))
    return path


def write_fleet(directory: Path, runs: int = 24) -> None:
    """Write runs, one a day: node1 is the straggler in every second one, one line hangs three times, bandwidth halves.

    The bandwidth falls two thirds through, the step time stays what it is but for noise.
    """
    for i in range(runs):
        found: tuple[Finding, ...] = (STRAGGLER,) if i % 2 else ()
        if i in (3, 9, 15):
            found += (hang(88),)
        noise = 1 + ((i * 7919) % 97 - 48) / 2000
        write_run(
            directory / f"run-{i:03}", TUESDAY + (i - runs * 2 // 3) * DAY, findings=found, step_ms=100.0 * noise,
            bandwidth_gbps=(40.0 if i < runs * 2 // 3 else 20.0) * noise,
            hosts=("node0", "node1") if i % 4 != 2 else ("node0", "node2"),
        )  # fmt: skip
