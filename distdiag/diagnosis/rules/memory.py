"""memory: host or device memory that grows, differs between ranks, or is nearly full."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distdiag.diagnosis import kinds
from distdiag.diagnosis.comparison import Veto, above, vetoed
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.kept import kept
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.step_times import mean_step_s
from distdiag.diagnosis.text.phrases import at, wheres
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.training_data import model_parallel
from distdiag.terms.units import rough_time, size_text

kind = kinds.MEMORY
MIB = 1 << 20
Bounds = tuple[tuple[int, float, float], ...]
Points = tuple[tuple[float, int], ...]  # (t_s, bytes), oldest first


@dataclass(frozen=True)
class Limits:
    growth_bytes: int = 192 * MIB
    """Bytes of growth below which nothing is reported: the allocators and caches of a healthy job
    grow as much."""
    alone_bytes: int = 128 * MIB
    """The same if only these ranks grow while the others train, too: allocators and caches would
    grow on all ranks."""
    growth: Bounds = ((10, 10.0, 0.25), (7, 6.0, 0.5))
    """(samples, seconds, growth as a share of the first sample): one triple must be reached. Fast
    growth needs less time."""
    device_growth: Bounds = ((30, 30.0, 0.25),)
    """The same for devices: torch reserves in jumps until it has seen every shape."""
    window_s: float = 60.0
    """Seconds of samples that are judged."""
    points: int = 60
    """Most samples that are judged."""
    patience: float = 0.02
    """Share of the time left until memory is full during which it must keep growing. A cache or
    replay buffer also fills up, so the more time is left, the longer growth is watched."""
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
    """Least number of bytes above the others. A rank that has read a file for all keeps some
    hundred MiB in its allocator."""
    imbalance_share: float = 0.5
    """The same as a share of the others' memory."""
    imbalance_share_of_host: float = 0.02
    """The same as a share of the host's total memory: less does not end a job."""
    imbalance_s: float = 5.0
    """Seconds in a row that it must be above, in at least three samples."""


limits = Limits()
_VETOES = (
    Veto(lambda s: not any(r.memory or r.device_bytes for r in s.ranks.values()), "memory is not measured", False),
    Veto(lambda s: not any(r.warm_since_s is not None for r in s.ranks.values()),
         "no rank has made its first 20 steps", False),
    Veto(lambda s: all(_watched_s(r) < limits.growth[-1][1] for r in s.ranks.values()),
         f"memory is known for less than {limits.growth[-1][1]:.0f} s since the first 20 steps", False),
)  # fmt: skip

GROWTH = Template(
    kind, "growth",
    "{place} memory of {who} grows by {pace} ({minute:size} a minute), {now:size} at step {step}{left}", "{cost}",
    "{do}look for what is kept across steps: {kept}a list of losses or outputs without .item() or .detach(), a cache or a log without a limit")  # fmt: skip
WORKERS = replace(GROWTH, advice=
    "look for what the dataset keeps in its workers: {kept}a cache without a limit, or a list or dict of Python objects, whose pages "
    "each worker copies one by one, as reading an object changes its reference count: keep them in one NumPy, torch or Arrow array; "
    "with persistent_workers=False, what a worker has gathered is freed at the end of the epoch")  # fmt: skip
FILLS = replace(GROWTH,
    message=GROWTH.message + "; it may be a cache that fills up to its limit: {limit}", cost="{cost}, unless the limit is reached before",
    advice="check that memory suffices for all ranks when it is full; it is filled by {fills}", severity=Severity.INFO)  # fmt: skip
_GC_OFF = (
    "garbage collection is off there (`gc.disable()`), so objects in reference cycles are never freed: call `gc.collect()` at "
    "the same step on all ranks, or break the cycles; else "
)
HOST_IMBALANCE = Template(
    kind, "imbalance",
    "{culprits} {culprits:holds|hold} {most:size} of host memory, the others {typical:size}",
    "the fullest rank is the first to be killed when memory runs out",
    "find what only that rank keeps: {kept}a cache, gathered state or a list of outputs; shard it, or free it after use",
    proved=True)  # fmt: skip
DEVICE_IMBALANCE = Template(
    kind, "imbalance",
    "{culprits} {culprits:uses|use} {most:size} of device memory, the others {typical:size}",
    "the fullest rank limits the batch of all",
    "check that not everything is loaded onto one device (map_location, cuda:0)", proved=True)  # fmt: skip
HEADROOM = Template(
    kind, "headroom", "device memory of {culprits} is above {most:.0%} of the card",
    "the next larger batch or fragment ends in an out-of-memory error",
    "use a smaller batch, activation checkpointing, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    proved=True, severity=Severity.INFO)  # fmt: skip  # healthy jobs are often tuned to fill their cards
_FULL_HOST = "the job is killed when the host's memory is used up"
_FULL_DEVICE = "an out-of-memory error ends the job when the card is full"


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    s = facts.snapshot
    if (veto := vetoed(_VETOES, s)) is not None:
        yield veto
    if (growth := _on_host(facts, "memory") or _on_host(facts, "worker_memory") or _on_device(facts)) is not None:
        yield growth
    yield from _imbalance(facts, HOST_IMBALANCE, _late(s), limits.imbalance_share_of_host * (s.host_memory_bytes or 0))
    used = {q: r.device_bytes for q, r in s.ranks.items() if r.device_bytes and r.device_total_bytes}
    tight = [q for q, n in used.items() if n > limits.headroom * (s.ranks[q].device_total_bytes or 1)]
    if tight:
        yield HEADROOM(culprits=tight, most=limits.headroom)
    yield from _imbalance(facts, DEVICE_IMBALANCE, used)


# -- growth ----------------------------------------------------------------------------------------------------------


def slope(points: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return (bytes per second, R^2) of a least-squares line."""
    n = len(points)
    mean_s, mean = sum(t for t, _ in points) / n, sum(b for _, b in points) / n
    times = sum((t - mean_s) ** 2 for t, _ in points)
    sizes = sum((b - mean) ** 2 for _, b in points)
    both = sum((t - mean_s) * (b - mean) for t, b in points)
    return (both / times, both * both / (times * sizes)) if times and sizes else (0.0, 0.0)


def _watched_s(r: RankState) -> float:
    """Return for how many seconds a rank's memory is known since its first steps."""
    newest = max((of[-1][0] for of in (r.memory, r.device_memory) if of), default=0.0)
    return newest - (newest if r.warm_since_s is None else r.warm_since_s)


def _recent(r: RankState, of: str, window_s: float, since_s: float) -> Points:
    """Return the newest samples since the warm-up and `since_s`; none if the rank does not train."""
    memory: Points = getattr(r, of)
    if r.life != Life.RUNNING or r.warm_since_s is None or not memory:
        return ()
    since_s = max(since_s, r.warm_since_s, memory[-1][0] - window_s)
    return tuple(point for point in memory if point[0] >= since_s)


def _growing(
    s: Snapshot, of: str, ranks: Iterable[int], bounds: Bounds, least: int, since_s: float, patience_s: float = 0.0
) -> dict[int, float]:
    """Return the bytes per second of those of these ranks whose memory grows steadily while they train.

    What a rank gathers in one long step, as when it evaluates or draws, is not kept across steps: growth counts from
    `since_s`, the end of the newest such step, or now.
    """
    out: dict[int, float] = {}
    for q in ranks:
        # some more, as the oldest samples are no multiple of a second ago, and many are thinned
        points = _recent(s.ranks[q], of, max(limits.window_s, 1.1 * patience_s), since_s)
        points = points[:: -max(1, len(points) // limits.points)][::-1]
        if len(points) < 2:
            continue
        span_s, grown = points[-1][0] - points[0][0], points[-1][1] - points[0][1]
        reached = (len(points) >= n and span_s >= x and grown >= max(least, y * points[0][1]) for n, x, y in bounds)
        if span_s < patience_s or not any(reached):
            continue
        (rate, fit), half = slope(points), len(points) // 2
        first, second = slope(points[:half])[0], slope(points[half:])[0]
        steady = rate > 0 and fit > limits.fit and first > 0 and 1 / limits.halves < second / first < limits.halves
        if steady and not any(b[1] < a[1] - 4 * MIB for a, b in itertools.pairwise(points)):
            out[q] = rate
    return out


def _others(s: Snapshot, growing: Mapping[int, float], since_s: float, of: str) -> dict[int, float | None]:
    """Return the bytes per second by which each other rank has grown, steadily or not; None if that is not known."""
    recent = {q: _recent(r, of, limits.window_s, since_s) for q, r in s.ranks.items() if q not in growing}
    return {
        q: (p[-1][1] - p[0][1]) / (p[-1][0] - p[0][0]) if len(p) > 1 and p[-1][0] > p[0][0] else None
        for q, p in recent.items()
    }


def _alone(s: Snapshot, growing: Mapping[int, float], others: Mapping[int, float | None]) -> bool:
    """True if at least as many other ranks train, too, and do not grow."""
    if not growing or len(others) < len(growing) or len(s.ranks) < s.world_size or model_parallel(s):
        return False
    return all(x is not None and x < limits.flat * min(growing.values()) for x in others.values())


def _on_host(facts: Facts, of: str) -> Finding | None:
    """Return the finding of host memory that grows steadily: `memory` of the ranks, or `worker_memory`."""
    s, since_s = facts.snapshot, facts.pauses.long_until_s
    found = _growing(s, of, s.ranks, limits.growth, limits.alone_bytes, since_s)
    alone = _alone(s, found, _others(s, found, since_s, of))
    least = limits.alone_bytes if alone else limits.growth_bytes
    found = found if alone else _growing(s, of, found, limits.growth, least, since_s)
    if not found:
        return None
    left_s = s.host_available_bytes / sum(found.values()) if s.host_available_bytes else None
    patience_s = min(limits.patience * (left_s or 0.0), limits.alone_s if alone else limits.patience_s)
    found = _growing(s, of, found, limits.growth, least, since_s, patience_s)
    if not found:
        return None
    # those that grow as fast but less steadily have the same fault
    others, fast = _others(s, found, since_s, of), min(found.values()) / limits.halves
    return _grows(facts, of, found | {q: x for q, x in others.items() if x is not None and x >= fast}, left_s)


def _on_device(facts: Facts) -> Finding | None:
    s, ranks, bounds = facts.snapshot, facts.snapshot.ranks, limits.device_growth
    found = _growing(s, "device_memory", ranks, bounds, limits.growth_bytes, facts.pauses.long_until_s)
    left_s = (max(0, (ranks[q].device_total_bytes or 0) - ranks[q].device_memory[-1][1]) / found[q] for q in found)
    return _grows(facts, "device_memory", found, min(left_s)) if found else None


def _grows(facts: Facts, of: str, rates: dict[int, float], left_s: float | None) -> Finding:
    s = facts.snapshot
    ranks, most = sorted(rates), max(rates, key=lambda q: rates[q])
    r, rate, device, workers = s.ranks[most], rates[most], of == "device_memory", of == "worker_memory"
    _, now = getattr(r, of)[-1]
    # on average: a usual step is shorter than one in which memory is allocated or swept
    per_step = rate * (mean_step_s(r) or s.usual_step_s or 0.0)
    puts = kept([r.user_stack, *r.phase_stacks.values()], facts.source, in_workers=workers, step=r.step)
    shown = [f"`{x.text}`{at(x.site)}" for x in puts]
    gc_off = all(s.ranks[q].gc_off for q in ranks) and not workers
    limit = next((f"`{line}`{at(site)}" for line, site in (x.limit for x in puts if x.limit and not gc_off)), None)
    backward = {q: stack[0] for q in ranks if (stack := s.ranks[q].phase_stacks.get("backward"))}
    who = "every rank" if len(ranks) == len(s.ranks) > 1 else rank_list(ranks)
    return (FILLS if limit else WORKERS if workers else GROWTH)(
        culprits=ranks, where=wheres(s, ranks, None, backward), step=r.step, place="device" if device else "host",
        who=f"worker processes of {who}" if workers else who,
        pace=f"{size_text(int(per_step))} per step" if per_step else f"{size_text(int(rate))} per second",
        minute=rate * 60, now=now, left=f", full {'within' if workers else 'in'} {rough_time(left_s)} at this rate" if left_s is not None else "",
        cost=_FULL_DEVICE if device else _FULL_HOST, do=_GC_OFF if gc_off else "", limit=limit,
        kept="".join(f"{put}, " for put in shown), fills=" and ".join(shown),
    )  # fmt: skip


# -- imbalance -------------------------------------------------------------------------------------------------------


def _late(s: Snapshot) -> dict[int, int]:
    """Return each rank's least host memory in its newest samples; empty unless known of all.

    Known: at least three samples span `imbalance_s`.
    """
    out: dict[int, int] = {}
    for r in s.ranks.values():
        points = [x for x in r.memory if r.warm_since_s is not None and x[0] > r.warm_since_s]
        old = [i for i, x in enumerate(points) if x[0] <= points[-1][0] - limits.imbalance_s]
        if r.life == Life.RUNNING and old and len(points) - old[-1] >= 3:
            out[r.rank] = min(size for _, size in points[old[-1] :])
    return out if len(out) >= s.world_size else {}


def _imbalance(facts: Facts, template: Template, values: dict[int, int], least: float = 0.0) -> Iterator[Finding]:
    """Yield ranks whose memory is far above the others'; nothing unless that of all ranks is known."""
    s = facts.snapshot
    if len(values) < max(2, len(s.ranks)) or model_parallel(s):
        return
    odd, typical = above(values, lambda typical: max(limits.imbalance_bytes, limits.imbalance_share * typical, least))
    if odd:
        r, most = s.ranks[odd[0]], values[odd[0]]
        puts = kept([r.user_stack, *r.phase_stacks.values()], facts.source, in_workers=False, step=r.step)
        named = "".join(f"`{x.text}`{at(x.site)}, " for x in puts)
        yield template(
            culprits=odd, where=wheres(s, odd), site=None, step=r.step, most=most, typical=typical, kept=named
        )
