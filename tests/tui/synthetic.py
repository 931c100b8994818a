"""Synthetic runs made through the store's writer: any number of ranks, every state; for tests, benchmarks and pictures.

Deterministic: the same scenario gives the same numbers.
"""

from __future__ import annotations

import random
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from distdiag.diagnosis.model.findings import CollectiveRef, Finding, Where
from distdiag.store import stacks
from distdiag.store.frames import RankRow
from distdiag.store.rows import (
    CollectiveRow,
    GpuRow,
    GroupRow,
    HostRow,
    LoaderRow,
    ProcessRow,
    ScalarRow,
    StepRow,
)
from distdiag.store.writer import Writer

NOW = 1_700_000_000.0  # the wall clock of tests that freeze it
TRAIN = "/home/user/job/train.py"
SEQ = 5403
MIB = 2**20


@dataclass(frozen=True)
class Scenario:
    """What to simulate.

    Attributes:
        state: waiting running stalled deadlocked lost ended failed.
        ranks: World size; eight ranks per node.
        frames: Frames, half a second apart; the last one shows the state, the earlier ones a running job.
        steps: Steps with raw rows.
        gpus: Whether the nodes have GPUs.
        hostile: Host names, paths and messages full of markup and control characters.
    """

    state: str = "running"
    ranks: int = 8
    frames: int = 8
    steps: int = 120
    gpus: bool = True
    hostile: bool = False
    name: str = "llama-1b"
    t_s: float = 271.0
    step: int = 1203

    @property
    def culprit(self) -> int:
        return 677 if self.ranks > 700 else min(5, self.ranks - 1)


HOSTILE = "[red]x[/]\x1b[31m\n\x07\u202eevil\u200b"


def host_of(sc: Scenario, rank: int) -> str:
    return HOSTILE if sc.hostile and rank == 0 else f"node{rank // 8:03}"


def times(sc: Scenario, rank: int, step: int) -> dict[str, Any]:
    """Return phase times of one rank in one step, ms: the culprit loads data slowly in 46 of 50 steps."""
    x = (rank * 7919 + step * 104_729 + rank * step * 31) % 9973  # cheap noise: this is called a million times
    data, forward = 2.2 + x % 89 / 100, 48 + x % 97 / 100
    backward, optimizer = 97 + x % 193 / 100, 11 + x % 83 / 100
    slow = sc.ranks > 1 and step % 50 not in (7, 19, 31, 40)
    top = 222.5 + x % 91 / 100 if sc.state != "healthy" else 161.5
    if rank == sc.culprit and slow and sc.state != "healthy":
        data += 61.0
    own = data + forward + backward + optimizer
    total = max(top, own) + 8.0
    wait = total - own
    return {
        "data_ms": data, "h2d_ms": 0.3, "forward_ms": forward, "backward_ms": backward + wait, "optimizer_ms": optimizer,
        "other_ms": 0.4, "wait_ms": wait, "step_ms": total + 0.7, "self_ms": own + 0.7,
    }  # fmt: skip


def rows(sc: Scenario, state: str, step: int, t_s: float) -> list[RankRow]:
    """Return the frame's rows at one time."""
    out = []
    stuck = state in ("stalled", "deadlocked")
    for r in range(sc.ranks):
        base = {
            "rank": r,
            "node": r // 8,
            "local_rank": r % 8,
            "host": host_of(sc, r),
            "gpu": r % 8 if sc.gpus else None,
        }
        if state == "waiting":
            if r % 8 in (3, 7):
                out.append(RankRow(**base, life="missing"))
            else:
                out.append(
                    RankRow(
                        **base,
                        pid=21873 + r,
                        life="starting",
                        phase="init",
                        phase_age_s=20.0,
                        step=0,
                        rss_bytes=900 * MIB,
                        heartbeat_age_s=0.2,
                    )
                )
            continue
        t = times(sc, r, step)
        own = t["self_ms"]
        reference = 161.5
        flagged = r == sc.culprit and state not in ("ended",)
        row = RankRow(
            **base, pid=21873 + r, life="running", t_s=t_s, heartbeat_age_s=0.2, phase="forward", phase_age_s=0.02, step=step,
            epoch=2, file=TRAIN, line=91, function="main", rss_bytes=(3000 + r % 7) * MIB, dropped=0, recorder_errors=0,
            delta_self_ms=own - reference, samples_per_s=32 / t["step_ms"] * 1000, loss=2.31 - step / 2000,
            device_bytes=int((61.2 + (r * 7 % 11) / 10) * 2**30) if sc.gpus else None, last_op="all_reduce", last_group="default_pg",
            last_seq=SEQ, last_bytes=25 * MIB, cpu_pct=97.0 + r % 3, late_ms=0.1 if r != sc.culprit else 60.2,
            slowest_in=46 if r == sc.culprit else 1 if r % 3 == 0 else 0, severity="error" if flagged else None, activity="user_code", **t,
        )  # fmt: skip
        if stuck and r != sc.culprit:
            row = msgspec.structs.replace(
                row, phase="backward", phase_age_s=31.2, waiting_op="all_reduce", waiting_group="default_pg", waiting_seq=SEQ + 1,
                waiting_bytes=25 * MIB, waiting_age_s=31.2, last_seq=SEQ + 1, activity="waiting",
            )  # fmt: skip
        elif stuck:
            row = msgspec.structs.replace(
                row, phase="data", phase_age_s=31.4, line=118, function="next_batch", activity="data"
            )
        elif state == "lost" and r == sc.culprit:
            row = msgspec.structs.replace(row, life="silent", heartbeat_age_s=14.2)
        elif state == "failed":
            if r == sc.culprit:
                row = msgspec.structs.replace(row, life="killed", signal=9, exit_code=-9)
            else:
                row = msgspec.structs.replace(
                    row, life="crashed", exit_code=1, exception="RuntimeError: Connection reset by peer", severity=None
                )
        elif state == "ended":
            row = msgspec.structs.replace(row, life="finished", exit_code=0, phase="done")
        out.append(row)
    return out


def findings(sc: Scenario) -> list[Finding]:
    """Return the findings at the last time."""
    c, host = sc.culprit, host_of(sc, sc.culprit)
    others = tuple(r for r in range(sc.ranks) if r != c)
    place = Where(c, TRAIN, 118, "next_batch", "data")
    common: dict[str, Any] = {
        "culprits": (c,),
        "where": (place,),
        "step": sc.step,
        "first_seen_s": sc.t_s - 31.2,
        "detected_s": sc.t_s - 29.8,
    }
    ref = CollectiveRef("all_reduce", "default_pg", SEQ + 1, 25 * MIB)
    slow = Finding(
        kind="straggler", cause="data", severity="error", certainty="suspected", **common,
        message=f"rank {c} ({host} gpu{c % 8})  data +61 ms/step, slowest in 46 of the last 50 steps",
        cost=f"{len(others):,} ranks wait 61 ms per step: 26% of step time",
        advice=f"check storage and CPU load on {host}; Enter for this rank",
    )  # fmt: skip
    out: list[Finding] = []
    if sc.state in ("running", "lost"):
        out.append(slow)
    if sc.state == "stalled":
        out.append(Finding(
            kind="stall", cause="data", severity="warning", certainty="suspected", collective=ref, victims=others, **common,
            message=f"rank {c} has not entered all_reduce #{SEQ + 1} (default_pg, 25.0 MiB); {len(others):,} of {sc.ranks:,} ranks wait since 31.2 s",
            cost="the job is not progressing; the backend aborts it in 568 s", advice="distdiag dump; all stacks are saved",
        ))  # fmt: skip
    if sc.state == "deadlocked":
        out.append(Finding(
            kind="deadlock", cause="missing_rank", severity="error", certainty="proved", collective=ref, victims=others, **common,
            waiting=tuple(Where(r, TRAIN, 91, "main", "waiting") for r in others[:7]),
            message=f"rank {c} has not entered all_reduce #{SEQ + 1} (default_pg, 25.0 MiB); {len(others):,} of {sc.ranks:,} ranks wait for it",
            cost="the job makes no progress", advice="compare train.py:118 with train.py:91: every rank must make the same calls",
            evidence=("flight_recorder/rank0.json", "stacks/latest.json"),
        ))  # fmt: skip
    if sc.state == "lost":
        out.insert(0, Finding(
            kind="rank_lost", cause="silent", severity="error", certainty="proved", culprits=(c,), first_seen_s=sc.t_s - 14, detected_s=sc.t_s - 10,
            message=f"rank {c} silent since 14 s; last seen in all_reduce #{SEQ}", cost="the others will hang at the next collective",
            advice=f"dmesg -T on {host} for oom-kill or Xid",
        ))  # fmt: skip
    if sc.state == "failed":
        out.append(Finding(
            kind="rank_lost", cause="killed", severity="error", certainty="proved", culprits=(c,), victims=others, first_seen_s=sc.t_s - 3,
            detected_s=sc.t_s - 2.5, where=(Where(c, TRAIN, 118, "next_batch", "killed"),), step=sc.step,
            message=f"rank {c} was killed by SIGKILL; {len(others):,} others ended with connection errors after it",
            cost="the job ended", advice=f"dmesg -T on {host}: out of memory?",
        ))  # fmt: skip
    if sc.state in ("running", "ended", "failed"):
        out.append(Finding(
            kind="unused_parameters", cause="never_used", severity="warning", certainty="proved", first_seen_s=3.0, detected_s=3.1, cleared_s=90.0,
            names=tuple(f"layers.{i}.adapter.weight" for i in range(5)), message="5 parameters got no gradient on any rank", cost="2.1 MiB held for nothing",
            advice="remove them from the model, or use their output in the loss",
        ))  # fmt: skip
    if sc.ranks > 700 and sc.state == "running":
        out.append(Finding(
            kind="straggler", cause="data", severity="warning", certainty="suspected", culprits=(678,), first_seen_s=10.0, detected_s=12.0,
            message="rank 678 (node084 gpu6)  data +29 ms/step, late in 44 of the last 50 steps", cost="none while rank 677 is slower; then 4% of step time",
            advice="fix rank 677 first",
        ))  # fmt: skip
    if sc.hostile:
        out.append(Finding(kind="nonfinite", cause="loss", severity="error", message=f"loss is nan on {HOSTILE}", detected_s=1.0,
                           where=(Where(0, f"/tmp/{HOSTILE}.py", 3, HOSTILE, "user_code"),), advice=HOSTILE, names=(HOSTILE,)))  # fmt: skip
    return out


def state_text(sc: Scenario) -> str:
    n = sc.ranks
    return {
        "waiting": "", "running": "", "stalled": "no step for 31 s (usual 0.23 s)",
        "deadlocked": f"rank {sc.culprit} is missing in all_reduce #{SEQ + 1}; no step for 31 s",
        "lost": f"rank {sc.culprit} silent for 14 s; last seen in all_reduce {SEQ}", "ended": f"exit 0 after {sc.step:,} steps",
        "failed": f"rank {sc.culprit} exited with signal 9; {n - 1} others aborted",
    }[sc.state]  # fmt: skip


def frame_state(state: str) -> str:
    return {"lost": "degraded"}.get(state, state)


def fill(w: Writer, sc: Scenario) -> None:
    """Write the scenario into an open run."""
    first = sc.step - sc.steps + 1
    w.meta(
        name=sc.name, world_size=sc.ranks, backend="nccl" if sc.gpus else "gloo", started_unix_s=NOW - sc.t_s, max_steps=2000,
        command="train.py --amp", distdiag="0.1.0", torch="2.13.0",
    )  # fmt: skip
    w.groups([GroupRow(name="default_pg", ranks=tuple(range(sc.ranks)), backend="nccl", description="default_pg")])
    if sc.state != "waiting":
        for step in range(first, sc.step + 1):
            end = sc.t_s - (sc.step - step) * 0.23 - (31 if sc.state in ("stalled", "deadlocked") else 0)
            w.add([
                StepRow(rank=r, step=step, epoch=2, t_end_s=end, samples=32, loss=2.31 - step / 2000, rss_bytes=(3000 + (step - first) // 2 * (r == 1)) * MIB,
                        device_bytes=int(61.2 * 2**30) + (step - first) * MIB * 4 * (r == sc.culprit) if sc.gpus else None,
                        late_ms=60.2 if r == sc.culprit else 0.1, **times(sc, r, step))
                for r in range(sc.ranks)
            ])  # fmt: skip
            w.add([
                CollectiveRow(pgroup="default_pg", seq=SEQ - (sc.step - step) * 4 - k, op=op, dtype="float32", bytes=nbytes, ranks=sc.ranks, t_s=end,
                              duration_us=us * (1 + (step % 7) / 20), skew_us=61_000.0 + step % 5, late_rank=sc.culprit if step % 50 not in (7, 19, 31, 40) else 0, step=step,
                              arrivals_us=",".join(str(60_200 if r == sc.culprit else r % 7 * 300) for r in range(sc.ranks)) if step % 5 == 0 else None)
                for k, (op, nbytes, us) in enumerate((("all_reduce", 25 * MIB, 1210.0), ("all_reduce", 25 * MIB, 1190.0), ("all_reduce", 4, 50.0), ("broadcast", 64 * MIB, 2400.0)))
            ])  # fmt: skip
            if sc.ranks > 500:
                w.commit()
        w.add([ScalarRow(rank=0, step=sc.step, name="loss", value=1.7, t_s=sc.t_s)])
    _hardware(w, sc)
    w.add([
        LoaderRow(rank=r, loader=0, file=TRAIN, line=117, length=98 if r != 1 else 97, batch_size=32, dataset_length=50000, drop_last=False,
                  distributed_sampler=True, sampler_epoch=2, shuffle=True, epoch=3, batches=41, exhausted=False, in_training=True, workers=8,
                  fingerprint=0xABC0 + (r if r not in (2, 3) else 2), previous_fingerprint=0xFF00 + r)
        for r in range(sc.ranks)
    ])  # fmt: skip
    w.probe(12.0, "allreduce", "pass", '{"schema": "distdiag.probe/1", "probe": "allreduce", "world_size": 8, "backend": "nccl", "device": "H100",'
            ' "reasons": ["busbw above the floor of 30 GB/s at every size above 1 MiB"], "fit": {"latency_us": 18.2, "bandwidth_gbps": 38.9, "half_bandwidth_bytes": 707000},'
            ' "rows": [{"bytes": 4096, "time_us": {"p50": 20.1, "p95": 31.0}, "algbw_gbps": 0.2, "busbw_gbps": 0.36, "skew_us": 3.1, "late_rank": 2, "correct": true},'
            ' {"bytes": 26214400, "time_us": {"p50": 1190.0, "p95": 1240.5}, "algbw_gbps": 22.0, "busbw_gbps": 38.6, "skew_us": 9.4, "late_rank": 5, "correct": true}]}')  # fmt: skip
    for f in findings(sc):
        w.finding(f)
    w.event(0.2, "monitor", "info", f"{sc.ranks} ranks attached")
    for i in range(sc.frames):
        last = i == sc.frames - 1
        t = sc.t_s - (sc.frames - 1 - i) * 0.5
        state = sc.state if last or sc.state == "waiting" else "running"
        step = sc.step if last else sc.step - 2 * (sc.frames - 1 - i)
        w.frame(t, frame_state(state), state_text(sc) if last else "", rows(sc, state, step, t))
        if last:
            w.add(rows(sc, state, step, t))
    over = sc.state in ("ended", "failed")
    w.meta(state=frame_state(sc.state), ended_s=sc.t_s if over else None)


def _hardware(w: Writer, sc: Scenario) -> None:
    """Write twenty seconds of samples of hosts, processes and GPUs; for many ranks only the newest of hosts and processes."""
    for k in range(20) if sc.ranks <= 64 else (19,):
        t_s = sc.t_s - 20 + k
        for n in range((sc.ranks + 7) // 8):
            w.add([HostRow(t_s=t_s + n * 1e-6, node=n, host=host_of(sc, n * 8), cpu_pct=61.0 + n % 9 - (19 - k) % 5 * 4, load1=11.5, cores=64,
                             memory_used_bytes=(212 - (19 - k)) * 2**30, memory_total_bytes=512 * 2**30, disk_read_bytes_per_s=180e6,
                             disk_write_bytes_per_s=2e6, net_sent_bytes_per_s=9e6 + (19 - k) % 3 * 1e6, net_recv_bytes_per_s=8e6)])  # fmt: skip
        w.add([ProcessRow(t_s=t_s, rank=r, cpu_pct=97.0 + r % 3, rss_bytes=(3000 + r % 7 - (19 - k) * 20 * (r == 1)) * MIB, threads=42, children=8,
                                children_cpu_pct=220.0, read_bytes_per_s=22e6 - (19 - k) % 4 * 5e6, write_bytes_per_s=1e5)
                     for r in range(sc.ranks)])  # fmt: skip
    if not sc.gpus:
        w.event(0.4, "monitor", "info", "no NVIDIA driver on this node: no GPU readings")
        return
    for k in range(20):
        w.add([_gpu(sc, r, k) for r in range(min(sc.ranks, 1024))])


def _gpu(sc: Scenario, r: int, k: int) -> GpuRow:
    """Return one sample of a GPU; the third GPU of each node gets hot and lowers its clock in the second half."""
    hot = r % 8 == 2 and k >= 10
    return GpuRow(
        t_s=sc.t_s - 19 + k, node=r // 8, gpu=r % 8, uuid=f"GPU-{r}", name="H100", rank=r,
        utilization_pct=99.0 if sc.state in ("stalled", "deadlocked") else 60.0 + (r * 7 + k * 13) % 39, memory_utilization_pct=40.0,
        memory_used_bytes=int((62 + r % 3) * 2**30), memory_total_bytes=80 * 2**30, power_w=610.0 - r % 5 - 150 * hot, power_limit_w=700.0,
        temperature_c=61.0 + r % 9 + (2 * min(k, 10) if r % 8 == 2 else 0), sm_clock_mhz=1410.0 if hot else 1980.0, sm_clock_max_mhz=1980.0,
        throttle="thermal (software)" if hot else "", ecc_uncorrected=0, pcie_generation=5, pcie_generation_max=5,
        pcie_width=16 if r % 8 != 6 else 8, pcie_width_max=16, nvlink_active=18, processes=1,
    )  # fmt: skip


def tree(sc: Scenario) -> stacks.Stacks:
    """Return full stacks as in a dump: the culprit in its DataLoader, all others in backward."""
    common = (f"<module> {TRAIN}:140", f"main {TRAIN}:88")
    out = {}
    for r in range(sc.ranks):
        if r == sc.culprit:
            frames = (
                *common,
                f"next_batch {TRAIN}:118",
                "__next__ /venv/torch/utils/data/dataloader.py:1448",
                "get /usr/lib/python3.11/queue.py:171",
            )
            out[str(r)] = stacks.RankStack(stack=frames)
        else:
            frames = (*common, f"train_step {TRAIN}:91", "backward /venv/torch/_tensor.py:648")
            out[str(r)] = stacks.RankStack(stack=frames, op=f"all_reduce #{SEQ + 1} default_pg")
    return stacks.Stacks(t_s=sc.t_s - 4.0, ranks=out)


def make(path: Path, sc: Scenario, monitor: str = "live", with_stacks: bool = True) -> Path:
    """Write a whole run and return its directory.

    Args:
        monitor: live (heartbeat at NOW), gone (14 s before NOW), ended, always (live for a clock that is not frozen).
    """
    path.mkdir(parents=True, exist_ok=True)
    w = Writer(path)
    fill(w, sc)
    if not w.close():
        raise RuntimeError(w.last_error)
    if with_stacks and sc.state in ("stalled", "deadlocked"):
        stacks.write(path, tree(sc))
    set_monitor(path, "ended" if sc.state in ("ended", "failed") else monitor)
    return path


def set_monitor(path: Path, monitor: str, now: float = NOW) -> None:
    """Make the run look as if its monitor were alive, gone, or done."""
    con = sqlite3.connect(path / "run.db")
    with con:
        values = {
            "monitor_ended": "1" if monitor == "ended" else "0",
            "heartbeat_unix_s": str(now + {"gone": -14.2, "always": 1e10}.get(monitor, -0.1)),
        }
        values["monitor_host"] = "elsewhere"  # its process number means nothing here
        con.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
    con.close()


def live(path: Path, sc: Scenario, hz: float = 2.0, seconds: float = 60.0) -> None:
    """Keep writing frames in real time, as a monitor does; for benchmarks and tests of the live view."""
    w = Writer(path)
    fill(w, sc)
    w.meta(started_unix_s=time.time() - sc.t_s)
    begin = time.monotonic()
    n = 0
    base = rows(sc, sc.state, sc.step, sc.t_s)
    while (elapsed := time.monotonic() - begin) < seconds:
        n += 1
        step = sc.step + n
        rng = random.Random(n)
        fresh = [
            msgspec.structs.replace(r, step=step, self_ms=(r.self_ms or 0.0) + rng.random(), delta_self_ms=(r.delta_self_ms or 0.0) + rng.random(), wait_ms=(r.wait_ms or 0.0) + rng.random())
            for r in base
        ]  # fmt: skip
        w.frame(sc.t_s + elapsed, frame_state(sc.state), "", fresh)
        w.add(
            [
                StepRow(rank=r, step=step, t_end_s=sc.t_s + elapsed, **times(sc, r, step))
                for r in range(min(sc.ranks, 64))
            ]
        )
        w.commit()
        time.sleep(max(0.0, begin + n / hz - time.monotonic()))
    w.close()
