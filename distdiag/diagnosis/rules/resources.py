"""Memory of hosts and devices: what grows, what differs between ranks, what is nearly full."""

from __future__ import annotations

import itertools
import statistics

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list, size_text
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.text.phrases import at, where

MIB = 1 << 20
GROWTH_BYTES = 192 * MIB
GROWTH = ((10, 10.0, 0.25), (7, 6.0, 0.5))  # samples, seconds and share: what grows by half needs less of a look
DEVICE_GROWTH = ((30, 30.0, 0.25),)  # torch reserves in leaps until it has seen every shape
LOOKED_AT_S, POINTS = 60.0, 60  # of the memory's course
# What grows may be a cache or a replay buffer that fills up: the longer until memory is used up, the longer it is watched.
PATIENCE, PATIENCE_S = 0.02, 500.0  # share of that time; at most
HEADROOM = 0.95
IMBALANCE_BYTES = 512 * MIB
IMBALANCE_SHARE_OF_OTHERS, IMBALANCE_SHARE_OF_HOST = 0.6, 0.02  # of host memory: less brings no job to its end


def rules(s: Snapshot) -> list[Finding]:
    """Findings about memory."""
    return [*_growth(s), *_host_imbalance(s), *_device(s)]


def slope(points: list[tuple[float, int]]) -> tuple[float, float]:
    """(bytes per second, R^2) of a least-squares line."""
    n = len(points)
    mt = sum(t for t, _ in points) / n
    mb = sum(b for _, b in points) / n
    stt = sum((t - mt) ** 2 for t, _ in points)
    sbb = sum((b - mb) ** 2 for _, b in points)
    stb = sum((t - mt) * (b - mb) for t, b in points)
    if stt == 0 or sbb == 0:
        return 0.0, 0.0
    return stb / stt, stb * stb / (stt * sbb)


def _growing(
    r: RankState,
    memory: tuple[tuple[float, int], ...],
    bounds: tuple[tuple[int, float, float], ...] = GROWTH,
    patience_s: float = 0.0,
) -> float | None:
    """Bytes per second of growth that goes on, in both halves alike, while the rank trains; None otherwise."""
    if r.life != Life.RUNNING or r.warm_since_s is None or not memory:
        return None
    since_s = max(r.warm_since_s + 2.0, memory[-1][0] - max(LOOKED_AT_S, patience_s + 2.0))
    points = [p for p in memory if p[0] >= since_s]
    points = points[:: -max(1, len(points) // POINTS)][::-1]
    if len(points) < 2:
        return None
    span_s, grown = points[-1][0] - points[0][0], points[-1][1] - points[0][1]
    if span_s < patience_s or not any(
        len(points) >= n and span_s >= s and grown >= max(GROWTH_BYTES, share * points[0][1]) for n, s, share in bounds
    ):
        return None
    rate, fit = slope(points)
    half = len(points) // 2
    first, second = slope(points[:half])[0], slope(points[half:])[0]
    steady = rate > 0 and fit > 0.97 and first > 0 and 0.5 < second / first < 2.0
    never_down = sum(b[1] < a[1] - 4 * MIB for a, b in itertools.pairwise(points)) == 0
    return rate if steady and never_down else None


def _growth(s: Snapshot) -> list[Finding]:
    host = {r.rank: rate for r in s.ranks.values() if (rate := _growing(r, r.memory)) is not None}
    if host:
        left_s = s.host_available_bytes / sum(host.values()) if s.host_available_bytes else None
        patience_s = min(PATIENCE * (left_s or 0.0), PATIENCE_S)
        watched = {q: _growing(s.ranks[q], s.ranks[q].memory, patience_s=patience_s) for q in host}
        host = {q: rate for q, rate in watched.items() if rate is not None}
    if host:
        now = {q: s.ranks[q].memory[-1][1] for q in host}
        return [_grows(s, "host", host, now, left_s, "the job is killed when the host's memory is used up")]
    device = {
        r.rank: rate for r in s.ranks.values() if (rate := _growing(r, r.device_memory, DEVICE_GROWTH)) is not None
    }
    if device:
        now = {q: s.ranks[q].device_memory[-1][1] for q in device}
        left_s = min(((s.ranks[q].device_total_bytes or now[q]) - now[q]) / rate for q, rate in device.items())
        return [_grows(s, "device", device, now, left_s, "an out-of-memory error ends the job when the card is full")]
    return []


def _grows(
    s: Snapshot, kind: str, rates: dict[int, float], now: dict[int, int], left_s: float | None, cost: str
) -> Finding:
    ranks = tuple(sorted(rates))
    r = s.ranks[max(rates, key=lambda q: rates[q])]
    rate = rates[r.rank]
    per_step = rate * (s.usual_step_s or 0.0)
    everywhere = len(ranks) == len(s.ranks) and len(ranks) > 1
    stack = r.phase_stacks.get("backward") or r.user_stack
    left = "" if left_s is None else f", full in {_span(left_s)} at this rate"
    return Finding(
        kind="memory",
        cause="growth",
        certainty=Certainty.SUSPECTED,
        severity=Severity.WARNING,
        culprits=ranks,
        victims=(),
        where=tuple(where(s.ranks[q], None, (s.ranks[q].phase_stacks.get("backward") or (None,))[0]) for q in ranks),
        step=r.step,
        message=f"{kind} memory of {'every rank' if everywhere else rank_list(ranks)} grows by "
        f"{size_text(int(per_step)) if per_step else size_text(int(rate)) + '/s'} per step "
        f"({size_text(int(rate * 60))} a minute), now {size_text(now[r.rank])}{left}{at(stack[0] if stack else None)}",
        cost=cost,
        advice="look for tensors kept across steps: a list of losses or outputs without .item() or .detach()",
    )


def _span(seconds: float) -> str:
    """A rough time: what matters is whether it is minutes or days."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _host_imbalance(s: Snapshot) -> list[Finding]:
    """One rank's host memory far above the others', after the first steps, for six samples in a row.

    A rank that has read a file for all keeps what its allocator does not give back: a few hundred MiB are nothing.
    """
    ranks = [r for r in s.ranks.values() if r.life == Life.RUNNING and r.warm_since_s is not None]
    if len(ranks) < 2 or len(ranks) < s.world_size or _model_parallel(s):
        return []
    late = {r.rank: [b for t, b in r.memory if t > (r.warm_since_s or 0.0)][-6:] for r in ranks}
    if any(len(v) < 6 for v in late.values()):
        return []
    floor = {q: min(v) for q, v in late.items()}
    usual = statistics.median_low(list(floor.values()))
    bound = max(
        IMBALANCE_BYTES, IMBALANCE_SHARE_OF_OTHERS * usual, IMBALANCE_SHARE_OF_HOST * (s.host_memory_bytes or 0)
    )
    odd = tuple(sorted(q for q, b in floor.items() if b - usual > bound))
    if not odd or len(odd) > len(floor) // 2:
        return []
    r = s.ranks[odd[0]]
    return [
        Finding(
            kind="memory",
            cause="imbalance",
            certainty=Certainty.PROVED,
            severity=Severity.WARNING,
            culprits=odd,
            victims=(),
            where=tuple(where(s.ranks[q]) for q in odd),
            step=r.step,
            message=f"{rank_list(odd)} hold{'s' if len(odd) == 1 else ''} {size_text(floor[odd[0]])} of host memory, "
            f"the others {size_text(usual)}",
            cost="the fullest rank is the first to be killed when memory runs out",
            advice="does only that rank keep a cache, a gathered state or all outputs? shard it, or free it after use",
        )
    ]


def _device(s: Snapshot) -> list[Finding]:
    known = {r.rank: r for r in s.ranks.values() if r.device_bytes and r.device_total_bytes}
    out = []
    tight = tuple(q for q, r in known.items() if (r.device_bytes or 0) > HEADROOM * (r.device_total_bytes or 1))
    if tight:
        out.append(
            Finding(
                kind="memory",
                cause="headroom",
                certainty=Certainty.PROVED,
                severity=Severity.INFO,  # many a healthy job is tuned to fill its cards
                culprits=tight,
                message=f"device memory of {rank_list(tight)} is above {HEADROOM:.0%} of the card",
                cost="the next larger batch or fragment ends in an out-of-memory error",
                advice="a smaller batch, activation checkpointing, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            )
        )
    if len(known) >= 2 and len(known) == len(s.ranks):
        values = {q: r.device_bytes or 0 for q, r in known.items()}
        usual = statistics.median_low(values.values())
        odd = tuple(sorted(q for q, v in values.items() if v - usual > max(IMBALANCE_BYTES, 0.5 * usual)))
        if odd and len(odd) <= len(values) // 2 and not _model_parallel(s):
            out.append(
                Finding(
                    kind="memory",
                    cause="imbalance",
                    certainty=Certainty.PROVED,
                    severity=Severity.WARNING,
                    culprits=odd,
                    message=f"{rank_list(odd)} uses {size_text(values[odd[0]])} of device memory, the others {size_text(usual)}",
                    cost="the fullest rank limits the batch of all",
                    advice="is everything loaded onto one device (map_location, cuda:0)?",
                )
            )
    return out


def _model_parallel(s: Snapshot) -> bool:
    return any(1 < len(g.ranks) < s.world_size for g in s.groups.values())
