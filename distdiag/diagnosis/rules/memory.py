"""memory: host or device memory that grows, differs between ranks, or is nearly full.

Faulty jobs: loss_history (growth), rank0_cache (imbalance). Healthy look-alikes: growing_context, worker_pool.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.text.phrases import at, rough_time, where
from distdiag.terms.units import size_text

kind = kinds.MEMORY
MIB = 1 << 20
Points = tuple[tuple[float, int], ...]  # (t_s, bytes), oldest first


@dataclass(frozen=True)
class Limits:
    growth_bytes: int = 192 * MIB
    """Bytes of growth below which nothing is reported: the allocators and caches of a healthy job grow as much."""
    alone_bytes: int = 128 * MIB
    """The same if only these ranks grow while the others train, too: allocators and caches would grow on all ranks."""
    growth: tuple[tuple[int, float, float], ...] = ((10, 10.0, 0.25), (7, 6.0, 0.5))
    """(samples, seconds, growth as a share of the first sample): one triple must be reached. Fast growth needs less time."""
    device_growth: tuple[tuple[int, float, float], ...] = ((30, 30.0, 0.25),)
    """The same for devices: torch reserves in jumps until it has seen every shape."""
    settle_s: float = 2.0
    """Seconds after the warm-up that are left out."""
    window_s: float = 60.0
    """Seconds of samples that are judged."""
    points: int = 60
    """Most samples that are judged."""
    patience: float = 0.02
    """Share of the time left until memory is full during which it must keep growing. A cache or replay buffer also fills up, so
    the more time is left, the longer growth is watched."""
    patience_s: float = 500.0
    """Longest time in seconds that growth is watched."""
    alone_s: float = 10.0
    """The same if only these ranks grow: a cache or buffer would fill on all ranks."""
    flat: float = 0.1
    """Share of their growth below which another rank counts as not growing."""
    fit: float = 0.97
    """Least R^2 of the straight line through the samples."""
    halves: float = 2.0
    """Factor by which the growth in the two halves of the samples may differ."""
    headroom: float = 0.95
    """Share of a card in use, above which an info is reported."""
    imbalance_bytes: int = 512 * MIB
    """Least number of bytes above the others. A rank that has read a file for all keeps some hundred MiB in its allocator."""
    imbalance_share: float = 0.6
    """The same as a share of the others' host memory."""
    imbalance_share_of_host: float = 0.02
    """The same as a share of the host's total memory: less does not end a job."""
    imbalance_share_of_device: float = 0.5
    """The same as a share of the others' device memory."""
    imbalance_s: float = 5.0
    """Seconds in a row that it must be above, in at least three samples."""


limits = Limits()


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield findings about memory."""
    snapshot = facts.snapshot
    if not any(r.memory or r.device_bytes for r in snapshot.ranks.values()):
        yield Abstained("memory is not measured")
    elif not any(r.warm_since_s is not None for r in snapshot.ranks.values()):
        yield Abstained("no rank has made its first 20 steps")
    growth = _growth(snapshot)
    yield from [growth] if growth else []
    yield from _host_imbalance(snapshot)
    yield from _device(snapshot)


# -- growth ----------------------------------------------------------------------------------------------------------


def slope(points: list[tuple[float, int]]) -> tuple[float, float]:
    """Return (bytes per second, R^2) of a least-squares line."""
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
    memory: Points,
    bounds: tuple[tuple[int, float, float], ...],
    least: int,
    patience_s: float = 0.0,
) -> float | None:
    """Return the bytes per second of steady growth while the rank trains; None otherwise."""
    if r.life != Life.RUNNING or r.warm_since_s is None or not memory:
        return None
    since_s = max(r.warm_since_s + limits.settle_s, memory[-1][0] - max(limits.window_s, patience_s + limits.settle_s))
    points = [p for p in memory if p[0] >= since_s]
    points = points[:: -max(1, len(points) // limits.points)][::-1]
    if len(points) < 2:
        return None
    span_s, grown = points[-1][0] - points[0][0], points[-1][1] - points[0][1]
    if span_s < patience_s or not any(
        len(points) >= n and span_s >= s and grown >= max(least, share * points[0][1]) for n, s, share in bounds
    ):
        return None
    rate, fit = slope(points)
    half = len(points) // 2
    first, second = slope(points[:half])[0], slope(points[half:])[0]
    steady = rate > 0 and fit > limits.fit and first > 0 and 1 / limits.halves < second / first < limits.halves
    never_down = sum(b[1] < a[1] - 4 * MIB for a, b in itertools.pairwise(points)) == 0
    return rate if steady and never_down else None


def _alone(s: Snapshot, growing: Mapping[int, float]) -> bool:
    """True if at least as many other ranks train, too, and do not grow."""
    others = [r for q, r in s.ranks.items() if q not in growing]
    if len(others) < len(growing) or len(s.ranks) < s.world_size or _model_parallel(s):
        return False
    return all(_flat(r, limits.flat * min(growing.values())) for r in others)


def _flat(r: RankState, rate: float) -> bool:
    """True if the memory of a rank that trains grows by less than `rate`, bytes per second."""
    if r.life != Life.RUNNING or r.warm_since_s is None or not r.memory:
        return False
    points = [p for p in r.memory if p[0] >= max(r.warm_since_s + limits.settle_s, r.memory[-1][0] - limits.window_s)]
    return len(points) > 1 and points[-1][1] - points[0][1] < rate * (points[-1][0] - points[0][0])


def _growing_on_host(ranks: Mapping[int, RankState], least: int, patience_s: float = 0.0) -> dict[int, float]:
    """Return the bytes per second of the ranks whose host memory grows steadily."""
    rates = {q: _growing(r, r.memory, limits.growth, least, patience_s) for q, r in ranks.items()}
    return {q: rate for q, rate in rates.items() if rate is not None}


def _growth(s: Snapshot) -> Finding | None:
    ranks = s.ranks
    host = _growing_on_host(ranks, limits.alone_bytes)
    alone = bool(host) and _alone(s, host)
    least = limits.alone_bytes if alone else limits.growth_bytes
    if host and not alone:
        host = _growing_on_host(ranks, least)
    if host:
        left_s = s.host_available_bytes / sum(host.values()) if s.host_available_bytes else None
        patience_s = min(limits.patience * (left_s or 0.0), limits.alone_s if alone else limits.patience_s)
        host = _growing_on_host({q: ranks[q] for q in host}, least, patience_s)
        if host:
            now = {q: ranks[q].memory[-1][1] for q in host}
            cost = "the job is killed when the host's memory is used up"
            return _grows(s, "host", host, now, left_s, cost)
    device = {
        q: rate
        for q, r in ranks.items()
        if (rate := _growing(r, r.device_memory, limits.device_growth, limits.growth_bytes)) is not None
    }
    if device:
        now = {q: ranks[q].device_memory[-1][1] for q in device}
        left_s = min(((ranks[q].device_total_bytes or now[q]) - now[q]) / rate for q, rate in device.items())
        cost = "an out-of-memory error ends the job when the card is full"
        return _grows(s, "device", device, now, left_s, cost)
    return None


# -- imbalance and headroom ------------------------------------------------------------------------------------------


def _host_imbalance(s: Snapshot) -> Iterator[Finding]:
    """Yield ranks whose host memory is far above the others' after the first steps, for some seconds in a row."""
    ranks = [r for r in s.ranks.values() if r.life == Life.RUNNING and r.warm_since_s is not None]
    if len(ranks) < 2 or len(ranks) < s.world_size or _model_parallel(s):
        return
    late = {r.rank: _newest([x for x in r.memory if x[0] > (r.warm_since_s or 0.0)]) for r in ranks}
    if any(len(v) < 3 for v in late.values()):
        return
    floor = {q: min(v) for q, v in late.items()}
    usual = statistics.median_low(list(floor.values()))
    share = limits.imbalance_share_of_host * (s.host_memory_bytes or 0)
    bound = max(limits.imbalance_bytes, limits.imbalance_share * usual, share)
    odd = tuple(sorted(q for q, b in floor.items() if b - usual > bound))
    if not odd or len(odd) > len(floor) // 2:
        return
    yield _imbalance(
        odd,
        f"{rank_list(odd)} hold{'s' if len(odd) == 1 else ''} {size_text(floor[odd[0]])} of host memory, "
        f"the others {size_text(usual)}",
        "the fullest rank is the first to be killed when memory runs out",
        "find the cache, gathered state or list of outputs that only that rank keeps; shard it, or free it after use",
        s,
    )


def _newest(points: Points | list[tuple[float, int]]) -> list[int]:
    """Return the bytes of the newest samples that span `imbalance_s`; nothing if they do not reach back so far."""
    since_s = points[-1][0] - limits.imbalance_s if points else 0.0
    start = next((i for i in reversed(range(len(points))) if points[i][0] <= since_s), None)
    return [] if start is None else [b for _, b in points[start:]]


def _device(s: Snapshot) -> Iterator[Finding]:
    known = {r.rank: r for r in s.ranks.values() if r.device_bytes and r.device_total_bytes}
    tight = tuple(q for q, r in known.items() if (r.device_bytes or 0) > limits.headroom * (r.device_total_bytes or 1))
    if tight:
        yield _headroom(tight)
    if len(known) < 2 or len(known) < len(s.ranks) or _model_parallel(s):
        return
    values = {q: r.device_bytes or 0 for q, r in known.items()}
    usual = statistics.median_low(values.values())
    bound = max(limits.imbalance_bytes, limits.imbalance_share_of_device * usual)
    odd = tuple(sorted(q for q, v in values.items() if v - usual > bound))
    if odd and len(odd) <= len(values) // 2:
        yield _imbalance(
            odd,
            f"{rank_list(odd)} use{'s' if len(odd) == 1 else ''} {size_text(values[odd[0]])} of device memory, "
            f"the others {size_text(usual)}",
            "the fullest rank limits the batch of all",
            "check that not everything is loaded onto one device (map_location, cuda:0)",
        )


def _model_parallel(s: Snapshot) -> bool:
    return any(1 < len(g.ranks) < s.world_size for g in s.groups.values())


# -- wording ----------------------------------------------------------------------------------------------------------


def _grows(
    s: Snapshot, kind_of: str, rates: dict[int, float], now: dict[int, int], left_s: float | None, cost: str
) -> Finding:
    ranks = tuple(sorted(rates))
    r = s.ranks[max(rates, key=lambda q: rates[q])]
    rate = rates[r.rank]
    per_step = rate * (s.usual_step_s or 0.0)
    everywhere = len(ranks) == len(s.ranks) and len(ranks) > 1
    stack = r.phase_stacks.get("backward") or r.user_stack
    left = "" if left_s is None else f", full in {rough_time(left_s)} at this rate"
    pace = f"{size_text(int(per_step))} per step" if per_step else f"{size_text(int(rate))} per second"
    return Finding(
        kind=kind.name,
        cause="growth",
        certainty=Certainty.SUSPECTED,
        severity=Severity.WARNING,
        culprits=ranks,
        where=tuple(where(s.ranks[q], None, (s.ranks[q].phase_stacks.get("backward") or (None,))[0]) for q in ranks),
        step=r.step,
        message=f"{kind_of} memory of {'every rank' if everywhere else rank_list(ranks)} grows by {pace} "
        f"({size_text(int(rate * 60))} a minute), now {size_text(now[r.rank])}{left}{at(stack[0] if stack else None)}",
        cost=cost,
        advice="look for tensors kept across steps: a list of losses or outputs without .item() or .detach()",
    )


def _imbalance(odd: tuple[int, ...], message: str, cost: str, advice: str, s: Snapshot | None = None) -> Finding:
    return Finding(
        kind=kind.name,
        cause="imbalance",
        certainty=Certainty.PROVED,
        severity=Severity.WARNING,
        culprits=odd,
        where=tuple(where(s.ranks[q]) for q in odd) if s else (),
        step=s.ranks[odd[0]].step if s else None,
        message=message,
        cost=cost,
        advice=advice,
    )


def _headroom(tight: tuple[int, ...]) -> Finding:
    return Finding(
        kind=kind.name,
        cause="headroom",
        certainty=Certainty.PROVED,
        severity=Severity.INFO,  # healthy jobs are often tuned to fill their cards
        culprits=tight,
        message=f"device memory of {rank_list(tight)} is above {limits.headroom:.0%} of the card",
        cost="the next larger batch or fragment ends in an out-of-memory error",
        advice="use a smaller batch, activation checkpointing, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )
