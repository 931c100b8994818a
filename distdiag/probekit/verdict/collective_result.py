"""Turn time stamps into rows (times, skew, bandwidth, modes, fit), and explain them in text."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from distdiag.probekit.measure.noise import over_blocks
from distdiag.probekit.measure.probe import Column, shown
from distdiag.probekit.measure.sampling import Stamped
from distdiag.probekit.verdict import decide
from distdiag.probekit.verdict.decide import FEW
from distdiag.probekit.verdict.result import HostNoise, Measure, Result, Row, TimeUs, Verdict, WrongValues, host_class
from distdiag.terms.operations import algorithm_bandwidth, bus_bandwidth, moves_bytes
from distdiag.terms.statistics import Samples, bootstrap_medians, find_modes, fit_latency_bandwidth
from distdiag.terms.units import message_size, time_text

if TYPE_CHECKING:
    from distdiag.probekit.ranks.job import Job

_COARSE = 6  # CLOCK_MONOTONIC_COARSE of clock_getres(2), whose resolution is the scheduler's tick
LATE_SHARE = 0.8  # a late rank is last in this share of the iterations
LATE_US = 100.0  # and by this much; smaller skews come from the order in which ranks leave the previous operation
_CLEAN_ENOUGH = 11
_TELLING_BYTES = 4 * 2**20  # least largest size of a sweep for advice on buckets
DDP_BUCKET_BYTES = 25 * 2**20  # torch.nn.parallel.DistributedDataParallel(bucket_cap_mb=25)


def build(
    name: str, op: str, job: Job, measured: list[tuple[int, Stamped, list[WrongValues]]], skipped: list[int]
) -> Result:
    result = new_result(job, name)
    result.ceilings = dict(job.ceilings or {})
    medians: list[Samples] = []
    for size, stamped, wrong in measured:
        row, replicates, block_medians = make_row(op, size, stamped, wrong, job)
        result.rows.append(row)
        medians.append(replicates)
        result.measures.append(Measure(str(size), "us", block_medians))
    if moves_bytes(op):
        fit = fit_latency_bandwidth([r.bytes for r in result.rows], medians)
        result.fit = asdict(fit) if fit else None
    result.host_noise = total_noise([s for _, s, _ in measured], result.rows)
    for row in result.rows:
        if text := tail_signature(row):
            result.notes.append(f"{message_size(row.bytes)}: {text}")
    decide.judge_collective(result, job.options.floor_gbps, skipped)
    return result


def new_result(job: Job, name: str) -> Result:
    """Return a result with the fields that all probes of this command share."""
    import torch

    versions: dict[str, str] = {"torch": str(torch.__version__)}
    if job.backend == "nccl":
        from torch.cuda import nccl

        versions["nccl"] = ".".join(map(str, nccl.version()))
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu"
    result = Result(name, job.world_size, job.backend, device, job.options.dtype)
    result.hosts = list(dict.fromkeys(job.hosts))
    result.versions = versions
    result.details = {"host_class": host_class(), "torch_threads": torch.get_num_threads()}
    result.clock_error_us = job.clock_error_ns / 1e3
    return result


def make_row(
    op: str, size: int, stamped: Stamped, wrong: list[WrongValues], job: Job
) -> tuple[Row, Samples, list[float]]:
    """Return (row, bootstrap replicates of its p50, medians of its blocks), all of the slowest rank."""
    clean = stamped.clean
    count = len(clean)
    enough = bool(clean.all()) or int(clean.sum()) >= min(_CLEAN_ENOUGH, count)
    keep = clean if enough else np.ones(count, dtype=bool)
    entered, left, block = stamped.entered_us[:, keep], stamped.left_us[:, keep], stamped.block[keep]
    durations, ranks = left - entered, len(entered)
    times = durations[int(np.argmax(np.median(durations, axis=1)))]  # of the slowest rank
    replicates = bootstrap_medians(times)
    few = times.size < FEW  # too few for resampling
    low, high = (float(v) for v in ((times.min(), times.max()) if few else np.percentile(replicates, [2.5, 97.5])))
    last_arrival = entered.max(axis=0)
    last = np.bincount(entered.argmax(axis=0), minlength=ranks) / times.size
    skew_us, p50 = float(np.median(last_arrival - entered.min(axis=0))), float(np.median(times))
    late = not few and last.max() >= LATE_SHARE and skew_us >= LATE_US
    moves = moves_bytes(op) and ranks > 1

    def busbw(us: float) -> float:
        return bus_bandwidth(op, size, us / 1e6, ranks)

    row = Row(
        bytes=size,
        elements=size // job.dtype.itemsize,
        iterations=times.size,
        time_us=TimeUs(float(times.min()), p50, float(np.percentile(times, 95)), float(times.max()), (low, high)),
        wire_us=float(np.median(left.max(axis=0) - last_arrival)),
        algbw_gbps=algorithm_bandwidth(size, p50 / 1e6) if moves else None,
        busbw_gbps=busbw(p50) if moves else None,
        busbw_ci95_gbps=(busbw(high), busbw(low)) if moves else None,
        skew_us=skew_us,
        late_rank=int(last.argmax()) if late else None,
        late_share=float(last.max()),
        correct=not wrong,
        wrong=wrong[:20],
        modes=find_modes(times),
        foreign_cpus=over_blocks(stamped.noise).foreign_cpus,
        noisy=not enough,
        dropped_iterations=count - times.size,
    )
    # one value per few iterations: neighbours are correlated, and a test needs independent values
    by_block = [times[block == b] for b in np.unique(block)]
    pieces = [p for of_block in by_block for p in np.array_split(of_block, max(1, min(4, len(of_block) // 5)))]
    return row, replicates, [float(np.median(p)) for p in pieces]


def total_noise(samples: list[Stamped], rows: list[Row]) -> HostNoise:
    """Return the foreign CPU over all blocks of a probe.

    It is noisy if a quarter of the sizes or more had too few clean blocks, or if half of all blocks were disturbed: then
    the clean ones are pauses of a busy host.
    """
    blocks = [n for s in samples for n in s.noise]
    few_clean = sum(r.noisy for r in rows) * 4 >= max(1, len(rows))
    return over_blocks(blocks, few_clean or sum(b.noisy for b in blocks) * 2 >= len(blocks))


def tail_signature(row: Row) -> str | None:
    """Describe the slower mode of a bimodal size, with its cause if the delay is that of a known mechanism."""
    if len(row.modes) != 2:
        return None
    fast, slow = row.modes[0]["time_us"], row.modes[1]["time_us"]
    text = f"two modes, {time_text(fast)} and {time_text(slow)} ({row.modes[1]['share']:.0%})"
    cause = tail_cause((slow - fast) / 1e3, time.clock_getres(_COARSE) * 1e3)
    return f"{text}: {cause}" if cause else text


def tail_cause(extra_ms: float, tick_ms: float) -> str | None:
    """Return the known cause of operations that take `extra_ms` longer than the others; None if there is none.

    `tick_ms` is the time between two ticks of the kernel's scheduler.
    """
    if 0.75 * tick_ms <= extra_ms <= 1.25 * tick_ms:
        return f"{tick_ms:g} ms is one scheduler tick: the rank waited for a CPU; give every rank its own (fewer ranks, pinning)"
    if 35 <= extra_ms <= 50:
        return "40 ms is TCP's delayed acknowledgement: enable TCP_NODELAY, or tcp quickack on the route"
    if 180 <= extra_ms <= 260:
        return "200 ms is TCP's least retransmission timeout: packets are lost; see `nstat -az TcpRetransSegs`"
    return None


COLUMNS = (
    Column("size", lambda row: message_size(row.bytes) if row.bytes else None),
    Column("n", lambda row: f"{row.iterations:,}" + "*" * row.noisy),
    Column("p50 µs", lambda row: f"{row.time_us.p50:,.1f}"),
    Column("95 % interval", lambda row: f"{row.time_us.ci95[0]:,.1f} … {row.time_us.ci95[1]:,.1f}"),
    Column("p95 µs", lambda row: f"{row.time_us.p95:,.1f}"),
    Column("wire µs", lambda row: f"{row.wire_us:,.1f}"),
    Column("skew µs", lambda row: f"{row.skew_us:,.1f}"),
    Column("late", lambda row: None if row.late_rank is None else f"rank {row.late_rank}"),
    Column("algbw GB/s", lambda row: shown(row.algbw_gbps, ".3f")),
    Column("busbw GB/s", lambda row: shown(row.busbw_gbps, ".3f")),
    Column("correct", lambda row: "yes" if row.correct else "NO"),
)


def explanation(op: str, result: Result) -> list[str]:
    """Return lines that explain the numbers: ceilings, fit, buckets, noise."""
    lines: list[str] = []
    named = {
        "memcpy_gbps": "memcpy",
        "tcp_both_ways_gbps": "TCP both ways at once, each",
        "nic_line_rate_gbps": "line rate of the card",
        "pcie_gbps": "PCIe",
        "nvlink_gbps": "NVLink",
    }
    ceilings = [f"{text} {v:.2f}" for key, text in named.items() if (v := result.ceilings.get(key)) is not None]
    if ceilings:
        lines.append("ceilings here, GB/s: " + ", ".join(ceilings))
    if f := result.fit:
        low, high = f["latency_ci95"]
        slow, fast = f["bandwidth_ci95"]
        lines.append(
            f"fit: {time_text(f['latency_us'])} [{time_text(low)}, {time_text(high)}] + size / "
            f"{f['bandwidth_gbps']:.3g} GB/s [{slow:.3g}, {fast:.3g}]; half that bandwidth at {message_size(f['half_bandwidth_bytes'])}"
            f"; a measured time differs from this line by up to {f['worst_error']:.0%}"
        )
        largest = max(r.bytes for r in result.rows)
        # not if latency dominates all sizes, or if a late rank caused the times
        telling = largest >= _TELLING_BYTES and largest >= 2 * f["half_bandwidth_bytes"]
        if op == "all_reduce" and telling and not any(r.late_rank is not None for r in result.rows):
            lines.append(bucket_advice(f["half_bandwidth_bytes"]))
    if few := [message_size(r.bytes) for r in result.rows if r.iterations < FEW]:
        lines.append(
            f"fewer than {FEW} iterations at {', '.join(few)}: the interval is their range; a larger --budget gives more"
        )
    if any(r.noisy for r in result.rows):
        lines.append("* too few quiet blocks: measured while others used this host's CPUs")
    return lines


def bucket_advice(half_bandwidth_bytes: float) -> str:
    """Return advice for DDP's `bucket_cap_mb` (default 25) from the fit: the share of the bandwidth that a bucket reaches."""
    share = 1 / (1 + half_bandwidth_bytes / DDP_BUCKET_BYTES)
    ninety = 9 * half_bandwidth_bytes
    mb = max(1, -(-int(ninety) // 2**20))
    text = f"DDP: a bucket of bucket_cap_mb=25 reaches {share:.0%} of the bandwidth; 90 % needs {message_size(ninety)}"
    if mb > 25:
        return f"{text}: raise bucket_cap_mb to {mb}"
    return f"{text}: bucket_cap_mb={mb} or more is enough, and smaller buckets overlap earlier"


def headline(result: Result) -> str:
    if not result.rows:
        return "nothing measured"
    first, last = result.rows[0], result.rows[-1]
    text = f"{time_text(first.time_us.p50)}" + (f" at {message_size(first.bytes)}" if first.bytes else "")
    if last.busbw_gbps is not None and last is not first:
        text += f", {last.busbw_gbps:.2f} GB/s at {message_size(last.bytes)}"
    ok = result.verdict != Verdict.FAIL or all(r.correct for r in result.rows)
    return text + (", correct" if ok else ", WRONG VALUES")
