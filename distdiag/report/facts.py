"""The facts of one run, read from run.db once as plain values; the renderers only format them.

Medians, because one slow step is not a slow job; quantiles are left out where the sample does not carry them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from distdiag.diagnosis.model.findings import Finding, Gradients, still_open
from distdiag.report import steps as step_tables
from distdiag.report.steps import Quantiles, SeriesPoint, Steps
from distdiag.report.words import verdict
from distdiag.store import rundir
from distdiag.store.liveness import Monitor, number
from distdiag.store.reader import Run
from distdiag.store.rows import Event, LoaderRow, ProbeResult
from distdiag.terms.operations import algorithm_bandwidth, bus_bandwidth, message_bytes, moves_bytes
from distdiag.terms.sites import line_text
from distdiag.terms.steps import DDP_TIMES, TIMES
from distdiag.terms.units import duration, percent
from distdiag.traces import saved as saved_profiles
from distdiag.traces.model import Profile

SCHEMA = "distdiag.report/1"
MAX_COLLECTIVE_ROWS = 400_000
ENOUGH_FOR_P99 = 100
# Keys of table `meta` that the report shows elsewhere, or that only programs read.
_KNOWN_META = frozenset({
    "schema_version", "monitor_host", "monitor_pid", "monitor_ended", "node", "distdiag", "torch", "python", "cuda",
    "nccl", "state", "state_text", "state_since_s", "started_unix_s", "ended_s", "heartbeat_unix_s", "memory_cgroup", "command",
    "name", "attempt", "backend", "world_size", "checks", "hang_ended_s",
})  # fmt: skip


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank; times are medians over its steps, ms."""

    rank: int
    node: int | None = None
    host: str | None = None
    gpu: int | None = None
    life: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    exception: str | None = None
    step: int | None = None  # newest
    steps: int = 0  # that the medians are of
    step_ms: float | None = None
    self_ms: float | None = None
    wait_ms: float | None = None
    # pauses are in means and totals only
    step_mean_ms: float | None = None
    waited_share: float | None = None  # of the time of its steps, in waiting for other ranks
    waited_s: float | None = None  # the same in seconds, of all its steps
    late_ms: float | None = None
    comm_ms: float | None = None  # of DDP's gradients; of the steps that DDP timed
    exposed_ms: float | None = None
    data_ms: float | None = None
    h2d_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    other_ms: float | None = None
    slowest_share: float | None = None  # of the steps, in how many its self time was the largest; sums to 1 over ranks
    rss_bytes: int | None = None  # largest
    device_bytes: int | None = None  # largest
    place: str | None = None  # file:line in function, where it was last seen
    waiting: str | None = None  # the collective it was last seen waiting in


class CollectiveSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All completed collectives of one operation, group, type and size."""

    pgroup: str
    op: str
    dtype: str | None
    bytes: int | None
    ranks: int | None
    count: int
    p50_us: float | None  # on the rank that arrived last: nothing of it is waiting for a late rank
    p99_us: float | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    skew_p50_us: float | None
    late_rank: int | None  # the one that arrived last most often …
    late_share: float | None  # … and in what share

    @property
    def latest(self) -> str | None:
        """Who arrives last most often, and in what share."""
        return None if self.late_rank is None else f"rank {self.late_rank} in {percent(self.late_share)}"


class HostSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One node over the run: means, and the peak of memory."""

    node: int
    host: str | None
    cores: int | None
    cpu_pct: float | None
    load1: float | None
    memory_peak_bytes: int | None
    memory_total_bytes: int | None
    disk_read_bytes_per_s: float | None
    disk_write_bytes_per_s: float | None
    net_sent_bytes_per_s: float | None
    net_recv_bytes_per_s: float | None


class GpuSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU over the run: means, and peaks where named."""

    node: int
    gpu: int
    name: str | None
    rank: int | None
    utilization_pct: float | None
    memory_peak_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    temperature_max_c: float | None
    sm_clock_mhz: float | None
    throttled_share: float | None  # of the samples
    throttle: str | None  # the reasons seen
    ecc_uncorrected: int | None
    pcie: str | None  # "gen 4 of 5, x8 of x16"


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    run: str
    name: str
    state: str
    state_text: str | None  # what decided it
    verdict: str  # the first line of `distdiag diagnose`: state, number of findings, ranks to examine first
    monitor: str
    started_unix_s: float | None
    duration_s: float | None
    world_size: int | None
    ranks_seen: int
    backend: str | None
    command: str | None
    versions: dict[str, str]
    details: dict[str, str]  # reported by the job: model, data, batch size, …
    attempt: int | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    first_step: int | None
    last_step: int | None
    sampled_every: int  # 1: all steps; k: every k-th
    step: Quantiles | None  # of the whole job
    samples_per_s: float | None
    steps_before_ms: float | None  # mean step time of the minutes whose step rows were thinned
    series: tuple[SeriesPoint, ...]
    ranks: tuple[RankSummary, ...]
    gradients: Gradients | None  # None: no DDP module was measured
    collectives: tuple[CollectiveSummary, ...]
    hosts: tuple[HostSummary, ...]
    gpus: tuple[GpuSummary, ...]
    loaders: tuple[LoaderRow, ...]
    profile: Profile | None  # the newest one of `distdiag profile`
    probes: tuple[ProbeResult, ...]
    events: tuple[Event, ...]

    @property
    def open_findings(self) -> tuple[Finding, ...]:
        return still_open(self.findings)

    @property
    def cleared_findings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.cleared_s is not None)


def read_facts(run: Run) -> RunFacts:
    meta = run.meta
    report = run.report()
    steps = step_tables.read_steps(run)
    job = step_tables.job_steps(steps)
    newest = run.query("SELECT max(t_s) FROM frame")[0][0]
    ended = number(meta.get("ended_s"))
    world, attempt = number(meta.get("world_size")), number(meta.get("attempt"))
    return RunFacts(
        run=str(run.path.resolve()),  # not reports/latest, which moves on
        name=meta.get("name") or run.path.resolve().name,
        state=report.state,
        state_text=report.state_text,
        verdict=verdict(report),
        monitor=str(run.monitor(meta)),
        started_unix_s=number(meta.get("started_unix_s")),
        duration_s=ended if ended is not None else newest,
        world_size=None if world is None else int(world),
        ranks_seen=report.ranks_seen,
        backend=meta.get("backend"),
        command=meta.get("command"),
        versions=versions(run),
        details={k: v for k, v in sorted(meta.items()) if v and k not in _KNOWN_META},
        attempt=None if attempt is None else int(attempt),
        findings=report.findings,
        notes=report.notes,
        first_step=int(job.step[0]) if len(job) else None,
        last_step=int(job.step[-1]) if len(job) else None,
        sampled_every=steps.every,
        step=step_tables.quantiles(job["step_ms"]),
        samples_per_s=step_tables.samples_per_s(job),
        steps_before_ms=run.query("SELECT sum(step_ms * steps) / sum(steps) FROM step_minute")[0][0],
        series=step_tables.series(job),
        ranks=_ranks(run, steps),
        gradients=report.gradients,
        collectives=_collectives(run),
        hosts=_hosts(run),
        gpus=_gpus(run),
        loaders=tuple(run.loaders()),
        profile=saved_profiles.newest(run.path),
        probes=tuple(run.probes()),
        events=tuple(run.events(100)),
    )


def versions(run: Run) -> dict[str, str]:
    """Return the versions of the libraries that the ranks use."""
    known = {k: v for k in ("distdiag", "torch", "python", "cuda", "nccl") if (v := run.meta.get(k))}
    recorded = rundir.read_run_json(run.path).get("versions")
    if isinstance(recorded, dict):
        known |= {str(k): str(v) for k, v in recorded.items() if v is not None}
    return known


_OF_ROW = ("node", "host", "gpu", "life", "exit_code", "signal", "exception", "step", "rss_bytes")  # of table `rank`


def _ranks(run: Run, steps: Steps) -> tuple[RankSummary, ...]:
    by_rank = steps.by_rank()
    slowest = step_tables.slowest_share(steps)
    rows = {r.rank: r for r in run.ranks()}
    found = []
    for rank in sorted({*rows, *by_rank}):
        row, own = rows.get(rank), by_rank.get(rank)
        values: dict[str, Any] = {"rank": rank, "slowest_share": slowest.get(rank)}
        if row is not None:
            values |= {name: getattr(row, name) for name in _OF_ROW}
            values["place"] = line_text(row.file, row.line, row.function) if row.file else None
            values["waiting"] = row.waiting()
        if own is not None:
            values |= {c: step_tables.median(own[c]) for c in (*TIMES, *DDP_TIMES)} | {"steps": len(own)}
            step_mean_ms, wait_mean_ms = step_tables.mean(own["step_ms"]), step_tables.mean(own["wait_ms"])
            values["step_mean_ms"] = step_mean_ms
            if wait_mean_ms is not None and step_mean_ms:
                values["waited_share"] = wait_mean_ms / step_mean_ms
                values["waited_s"] = wait_mean_ms / 1e3 * len(own) * steps.every
            peaks = {c: step_tables.largest(own[c]) for c in ("rss_bytes", "device_bytes")}
            values |= {c: int(peak) for c, peak in peaks.items() if peak is not None}
        found.append(RankSummary(**values))
    return tuple(found)


def _collectives(run: Run) -> tuple[CollectiveSummary, ...]:
    rows = run.query(
        "SELECT pgroup, op, dtype, bytes, ranks, duration_us, skew_us, late_rank FROM collective"
        " ORDER BY t_s DESC LIMIT ?",
        (MAX_COLLECTIVE_ROWS,),
    )
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in rows:
        groups.setdefault(row[:5], []).append(row[5:])
    out = [_collective(key, members) for key, members in groups.items()]
    # what took the longest in all comes first
    return tuple(sorted(out, key=lambda c: -(c.p50_us or 0.0) * c.count))


def _collective(key: tuple[Any, ...], members: Sequence[tuple[Any, ...]]) -> CollectiveSummary:
    pgroup, op, dtype, size, ranks = key
    ranks = ranks if isinstance(ranks, int) else None  # another table has text in a column of this name
    times = np.array([(d, s) for d, s, _ in members], dtype=np.float64)
    durations = times[:, 0][~np.isnan(times[:, 0])]
    p50 = step_tables.median(durations)
    late = Counter(r for *_, r in members if r is not None)
    latest, latest_count = late.most_common(1)[0] if late else (None, 0)
    algbw = busbw = None
    if p50 and moves_bytes(op) and (whole := message_bytes(op, size, ranks)):
        algbw = algorithm_bandwidth(whole, p50 / 1e6)
        busbw = bus_bandwidth(op, whole, p50 / 1e6, ranks) if ranks and ranks > 1 else None
    return CollectiveSummary(
        pgroup=pgroup,
        op=op,
        dtype=dtype,
        bytes=size,
        ranks=ranks,
        count=len(members),
        p50_us=p50,
        p99_us=float(np.percentile(durations, 99)) if len(durations) >= ENOUGH_FOR_P99 else None,
        algbw_gbps=algbw,
        busbw_gbps=busbw,
        skew_p50_us=step_tables.median(times[:, 1]),
        late_rank=latest,
        late_share=latest_count / late.total() if late else None,
    )


def _hosts(run: Run) -> tuple[HostSummary, ...]:
    rows = run.query(
        "SELECT node, max(host), max(cores), avg(cpu_pct), avg(load1), max(memory_used_bytes), max(memory_total_bytes),"
        " avg(disk_read_bytes_per_s), avg(disk_write_bytes_per_s), avg(net_sent_bytes_per_s),"
        " avg(net_recv_bytes_per_s) FROM host GROUP BY node ORDER BY node"
    )
    return tuple(HostSummary(**dict(zip(HostSummary.__struct_fields__, r, strict=True))) for r in rows)


def _gpus(run: Run) -> tuple[GpuSummary, ...]:
    rows = run.query(
        "SELECT node, gpu, max(name), max(rank), avg(utilization_pct), max(memory_used_bytes), max(memory_total_bytes),"
        " avg(power_w), max(temperature_c), avg(sm_clock_mhz), avg(throttle != ''), group_concat(DISTINCT throttle),"
        " max(ecc_uncorrected), max(pcie_generation), max(pcie_generation_max), max(pcie_width), max(pcie_width_max)"
        " FROM gpu GROUP BY node, gpu ORDER BY node, gpu"
    )
    out = []
    for row in rows:
        # the generation drops while a GPU is idle: the largest seen is what it can do here
        generation, generation_max, width, width_max = row[-4:]
        values = dict(zip(GpuSummary.__struct_fields__, row[:-4], strict=False))
        values["throttle"] = ",".join(sorted({t for t in (row[11] or "").split(",") if t})) or None
        values["pcie"] = (
            f"gen {generation} of {generation_max}, x{width} of x{width_max}" if generation and width else None
        )
        out.append(GpuSummary(**values))
    return tuple(out)


def notable_ranks(ranks: tuple[RankSummary, ...], most: int) -> tuple[RankSummary, ...]:
    """Return up to `most` ranks, by rank: all, or those with the largest self time (and those that are dead)."""
    if len(ranks) <= most:
        return ranks

    def weight(r: RankSummary) -> tuple[bool, float]:
        return (r.life in ("killed", "crashed", "stopped", "silent", "missing"), r.self_ms or 0.0)

    return tuple(sorted(sorted(ranks, key=weight, reverse=True)[:most], key=lambda r: r.rank))


def lasted(facts: RunFacts) -> str:
    """Return how long the run took, or has been running until what the report shows."""
    return duration(facts.duration_s) + (" so far" if facts.monitor == Monitor.LIVE else "")
