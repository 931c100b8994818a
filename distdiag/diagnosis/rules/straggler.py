"""straggler: a rank is late in a sustained share of steps, and the others wait for it.

The slow rank is the one that waits least (see `step_times`). The cost is counterfactual: the step time if this rank were
like the others. A rank that is slow in some steps only is a straggler if it costs the others a fifth of their time. If the
slowest rank keeps changing, the cause is `rotating` and no rank is blamed. In a loop without optimizer steps, the straggler is
the rank that enters its collectives last.

Faulty jobs: bn_tiles, ledger_flush, slow_disk, long_dialogs, grad_stats_hook, swapped_optim, thumb_logger, audit_turns, tiles_two_hosts.
Healthy look-alikes: bn_ice, ledger_shared, worker_pool, shared_storage, jittery_sim, gc_pauses, bucketed_lengths, pipe_three.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Arrival, RankState, Snapshot, Step
from distdiag.diagnosis.periodic import Periodic, periodic
from distdiag.diagnosis.slowest import arrives_last, slow_together, slowest
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.diagnosis.step_times import PHASES, Window, part_ms, self_ms
from distdiag.diagnosis.text.straggler import (
    Slow,
    arrival_finding,
    device_finding,
    periodic_finding,
    rotating_finding,
    slow_finding,
    stage_finding,
)
from distdiag.diagnosis.training_data import least_fetching
from distdiag.terms.units import percent

kind = kinds.STRAGGLER


@dataclass(frozen=True)
class Limits:
    recurrence: float = 0.75
    """Share of the window's steps in which the rank is the slowest. Chance gives 1 / ranks."""
    least_ms: float = 3.0
    """Milliseconds per step that the others would gain. An idle host's jitter is below this."""
    shares: tuple[tuple[float, float], ...] = ((3.0, 0.05), (1.6, 0.15))
    """(ratio of its slowest phase to the others', share of the step that must then be lost). A slower core, or one shared with
    another job, stretches all computation by some tens of per cent and is not the job's fault; extra work or waiting of one
    rank is many times that of the others."""
    shares_quiet_host: tuple[tuple[float, float], ...] = ((3.0, 0.05), (1.6, 0.15), (1.3, 0.10))
    """The same if the host has cores to spare."""
    busy_host_pct: float = 85.0
    """Use of all cores in per cent, above which ranks compete for them: their jitter is not evidence then."""
    starved: float = 0.1
    """Share of the time that a loader's workers were runnable without a CPU; above it they lack one."""
    asleep: float = 0.3
    """Cores used by a loader's workers; below it they wait for something other than a CPU."""
    control_ms: float = 0.3
    """Least optimizer time in milliseconds that shows how fast a rank's core is: this work is the same on all ranks."""
    jitter_ms: float = 10.0
    """Milliseconds per step on a busy host that count as its jitter if the rank spends them at the line of a collective call."""
    concentrated: float = 0.75
    """Share of the rank's excess that is in optimizer.step, on a busy host. Two healthy ranks that shared two cores with other
    work had 0.55; with extra work in optimizer.step it is nearly 1."""
    enough: int = 24
    """Most ranks whose median is computed as that of all: more would only cost time."""
    rotating_share: float = 0.35
    """Share of the step that is lost to the slowest rank, if it keeps changing. Two ranks on shared cores lose a third by chance."""
    rotating_ms: float = 20.0
    """The same in milliseconds per step."""
    rotating_steps: int = 40
    """Least number of steps that are judged, so that every rank of a small job can be the slowest."""
    rotating_changes: float = 0.4
    """Changes of the slowest rank, per step."""
    periodic_share: float = 0.2
    """Share of the time lost to a rank that is slow in every n-th step, above which it is a warning; never for a rank that works for
    all: the first of a node logs and saves, any may validate."""
    periodic_times: int = 4
    """Slow steps for that, over at least half of the steps that are judged."""
    device_ratio: float = 1.3
    """Ratio to the others' forward, by CUDA events: the same kernels on equal devices differ by a few per cent."""
    device_share: float = 0.05
    """Share of the step by which the device's forward is longer."""
    arrivals: int = 60
    """Newest collectives that are judged, in a loop without optimizer steps."""
    arrivals_share: float = 0.15
    """Share of the time between collectives that the others wait for the last rank."""


limits = Limits()
JUDGED_BY_ARRIVAL = (
    "all_reduce", "barrier", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all"
)  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the straggler, or why there is none."""
    if isinstance(facts.window, Abstained):
        yield _by_arrivals(facts.snapshot) or facts.window
        return
    found = _straggler(facts.snapshot, facts.window)
    if isinstance(found, Finding):
        if facts.shadows:
            found = _veto(f"{rank_list(facts.shadows)} ran out of data and only shadow the collectives")
        yield found
        return
    slow_device = _slow_device(facts.snapshot, facts.window)
    if slow_device is not None:
        yield slow_device
        return
    rotating = None if _has_stages(facts.snapshot) else _rotating(facts.snapshot, facts.window)
    slow_steps = periodic(facts.window)
    if slow_steps is not None and slow_steps.period is None:
        # ranks that compete for cores have such steps by chance, stages by design
        slow_steps = None if busy_host(facts.snapshot) or _has_stages(facts.snapshot) else slow_steps
    yield rotating or (found if slow_steps is None else _slow_at_times(facts.snapshot, facts.window, slow_steps))


def _has_stages(s: Snapshot) -> bool:
    """True if all ranks exchange messages and none has the whole model: stages of a pipeline, whose work differs by design."""
    replicas = {name for name, group in s.groups.items() if len(group.ranks) == s.world_size}
    return all(r.p2p_issued and not any(m.group in replicas for m in r.models) for r in s.ranks.values())


def _slow_at_times(s: Snapshot, window: Window, found: Periodic) -> Finding:
    """Return the finding of a rank that is slow in some steps: info, unless it costs much and is not a duty such as validation."""
    first, last = found.indices[0], found.indices[-1]
    steady = len(found.indices) >= limits.periodic_times and 2 * (last - first) >= len(window.columns)
    r = s.ranks[found.rank]
    for_all = r.local_rank == 0 or r.phase_sites.get("validate") or r.phase_sites.get("checkpoint")
    costly = found.cost >= limits.periodic_share and not for_all
    return periodic_finding(s, window, found, Severity.WARNING if steady and costly else Severity.INFO)


def _veto(reason: str) -> Abstained:
    return Abstained(reason, checked=True)


# -- one rank, or those of one node ----------------------------------------------------------------------------------


def _straggler(s: Snapshot, window: Window) -> Finding | Abstained:
    slow = _slow(s, window)
    if isinstance(slow, Abstained):
        return _unexplained_lead(window) or slow
    if not arrives_last(window, slow.ranks, limits.recurrence):
        return _veto(f"{rank_list(slow.ranks)}: works longest, but does not arrive last, so no rank waits for it")
    rest = [q for q in window.ranks if q not in slow.ranks]
    rest = rest[:: max(1, len(rest) // limits.enough)]
    found = _phase_of(s, window, slow, rest)
    if isinstance(found, Abstained):
        return found
    rank, phase, excess_ms = found
    if phase == "other" and excess_ms < limits.jitter_ms and busy_host(s) and _calls_collective(s.ranks[rank]):
        return _veto(f"rank {rank}: spends its time at a collective call, on a host whose cores are all in use")
    limit_ms = _loaders_limit(s, slow, rest) if phase == "data" else None
    if isinstance(limit_ms, Abstained):
        return limit_ms
    if _lacks_cpu(s, slow.ranks, phase, rest):
        return _veto(f"the loader workers of {rank_list(slow.ranks)} wait for a CPU, as those of all ranks may")
    if phase != "data" and _has_stages(s):
        return stage_finding(s, window, slow, rank, phase, excess_ms)
    return slow_finding(s, window, slow, rank, phase, excess_ms, limit_ms, _queued_ms(s, rank, rest, slow))


def _unexplained_lead(window: Window) -> Abstained | None:
    """Return why steps of equal work are not judged if waits are inferred and one rank always arrives long after the others.

    Hosts that run ahead until their launch queue is full wait there, in any phase, and not for the last to arrive. How far they
    are ahead is then constant, and is not what a step costs them.
    """
    if not window.inferred:
        return None
    ready = list(zip(*([x.ready_s or 0.0 for x in window.steps[q]] for q in window.ranks), strict=True))
    last = Counter(column.index(max(column)) for column in ready)
    index, count = last.most_common(1)[0]
    leads_ms = [(column[index] - max(t for i, t in enumerate(column) if i != index)) * 1e3 for column in ready]
    lead_ms = statistics.median(leads_ms)
    if count < limits.recurrence * len(ready) or lead_ms < limits.least_ms:
        return None
    return Abstained(
        f"rank {window.ranks[index]} arrives {lead_ms:.0f} ms after the others, in whose steps no wait for it is seen: their hosts may "
        "run ahead and wait for a place in the launch queue of their devices"
    )


def _slow(s: Snapshot, window: Window) -> Slow | Abstained:
    n = len(window.columns)
    ranks, count, gains = slowest(window)
    if count < limits.recurrence * n and not any(r.p2p_issued for r in s.ranks.values()):  # stages differ by design
        ranks, count, gains = slow_together(window, limits.least_ms)
    if count < limits.recurrence * n or not ranks:
        return _veto(f"no rank is the slowest in {percent(limits.recurrence)} of the last {n} steps")
    gain_ms = statistics.median(gains)
    step_ms = statistics.median(x.step_ms for x in window.steps[ranks[0]])
    least_ms = max(limits.least_ms, min(share for _, share in limits.shares_quiet_host) * step_ms)
    if gain_ms < least_ms:
        return _veto(f"{rank_list(ranks)}: costs {gain_ms:.1f} ms per step, below {least_ms:.1f} ms")
    return Slow(ranks, count, gain_ms, step_ms)


def _phase_of(s: Snapshot, window: Window, slow: Slow, rest: list[int]) -> tuple[int, str, float] | Abstained:
    """Return (the slowest rank, its phase, milliseconds above the others) if all slow ranks are slow in one phase."""
    steps, n = window.steps, len(window.columns)
    # per step, so that no rank is blamed for a step that is slow on all
    others = [statistics.median_low([self_ms(steps[k][i]) for k in rest]) for i in range(n)]
    usual = {
        p: statistics.median(statistics.median_low([part_ms(steps[k][i], p) for k in rest]) for i in range(n))
        for p in PHASES
    }
    found: list[tuple[int, str, float]] = []
    for q in slow.ranks[:: max(1, len(slow.ranks) // limits.enough)]:
        excess = _excess(s, steps[q], others, usual, slow, _queued_ms(s, q, rest, slow))
        if isinstance(excess, Abstained):
            return excess
        found.append((q, *excess))
    most = max(found, key=lambda x: x[2])
    if any(phase != most[1] for _, phase, _ in found):
        return _veto(f"{rank_list(slow.ranks)}: each is slow in another phase")
    return most


def _excess(
    s: Snapshot, steps: list[Step], others: list[float], usual: dict[str, float], slow: Slow, queued_ms: float
) -> tuple[str, float] | Abstained:
    """Return (the phase in which one rank exceeds the others most, milliseconds above them), or why that is no straggler.

    Args:
        steps: Steps of that rank.
        others: Typical `self_ms` of the others, by step.
        usual: Typical milliseconds of the others, by phase.
        queued_ms: Milliseconds per step that this rank waited for a CPU beyond the others: not its own work.
    """
    excess = statistics.median(self_ms(x) - b for x, b in zip(steps, others, strict=True)) - queued_ms
    excesses = {p: statistics.median(part_ms(x, p) for x in steps) - usual[p] for p in PHASES}
    phase = max(PHASES, key=lambda p: excesses[p])
    excesses[phase] = max(0.0, excesses[phase] - queued_ms)
    ratio = (usual[phase] + excesses[phase]) / max(usual[phase], 0.1)
    busy = busy_host(s)
    if busy and phase != "optimizer" and usual["optimizer"] > limits.control_ms:
        # optimizer.step computes the same on all ranks: if that takes longer, too, the core is the cause
        ratio /= max(1.0, 1.0 + excesses["optimizer"] / usual["optimizer"])
    needed = [share for factor, share in (limits.shares if busy else limits.shares_quiet_host) if ratio >= factor]
    if busy and phase == "optimizer" and excesses[phase] < limits.concentrated * excess:
        return _veto("its optimizer step is only part of its excess: a slower core explains that")
    if not needed:
        return _veto(f"its {phase} takes {ratio:.1f} times that of the others: a slower core explains that")
    if min(slow.gain_ms, excess) < max(limits.least_ms, needed[0] * slow.step_ms):
        return _veto(
            f"it costs {percent(min(slow.gain_ms, excess) / slow.step_ms)} of the step, below {percent(needed[0])}"
        )
    return phase, excesses[phase]


def _queued_ms(s: Snapshot, rank: int, others: list[int], slow: Slow) -> float:
    """Return milliseconds per step that a rank waited for a CPU beyond the others, if other work competes for the cores."""
    own = s.ranks[rank].queued_share
    theirs = [share for q in others if (share := s.ranks[q].queued_share) is not None]
    if own is None or not theirs or not busy_host(s):
        return 0.0
    return max(0.0, own - statistics.median_low(theirs)) * slow.step_ms


def _calls_collective(r: RankState) -> bool:
    """True if the line at which a rank is most often between its phases is a collective call: all ranks make it."""
    sites = r.phase_sites.get("other", ())
    return bool(sites) and sites[0][0].key in r.sites


def busy_host(s: Snapshot) -> bool:
    """True if ranks compete for cores, or if that is not known."""
    return s.host_cpu_pct is None or s.host_cpu_pct > limits.busy_host_pct


def _loaders_limit(s: Snapshot, slow: Slow, rest: list[int]) -> float | Abstained | None:
    """Return the most milliseconds per step that the job would gain if this rank's loader were like the others'; None if not known.

    A rank that waits for another finds its queue full, however slow its own loader is. The time that its workers fetch shows the
    speed: the loader alone would need that share of the step time.
    """
    fetching = [x.fetching for q in rest for x in s.ranks[q].loaders if x.in_training and x.workers]
    known = [share for share in fetching if share is not None]
    if not known:
        return None
    busiest = max(known)
    gain_ms = (1.0 - busiest) * slow.step_ms
    shares = limits.shares if busy_host(s) else limits.shares_quiet_host
    needed = [share for factor, share in shares if factor * busiest <= 1.0]
    if not needed or gain_ms < max(limits.least_ms, needed[0] * slow.step_ms):
        return _veto(
            f"the loaders of the other ranks are busy, too, {percent(busiest)} of the time: none could go much faster"
        )
    return gain_ms


def _lacks_cpu(s: Snapshot, slow: list[int], phase: str, rest: list[int]) -> bool:
    """True if loader workers of a slow rank wait for a CPU.

    If all loaders are at their limit, a slightly slower one causes all the waiting and fills the other queues: their own speed
    is not known then.
    """
    if phase != "data":
        return False
    busy = busy_host(s)
    for r in (s.ranks[q] for q in slow):
        asleep = r.workers_busy is not None and r.workers_busy < limits.asleep
        computing = any(x.workers for x in r.loaders) and not asleep
        starved = busy or (r.workers_starved or 0.0) > limits.starved
        if computing and starved and not _more_to_load(s, r, rest):
            return True
    return False


def _more_to_load(s: Snapshot, r: RankState, others: list[int]) -> bool:
    """True if a rank's loader has more than twice the work of any other's, whatever CPU they get.

    Ranks take equally many batches, so the time that workers run or wait for a CPU is their work for the same batches.
    """
    busy = [s.ranks[k].workers_busy for k in others if any(x.workers for x in s.ranks[k].loaders)]
    known = [x for x in busy if x is not None]
    return r.workers_busy is not None and 0 < len(known) == len(busy) and r.workers_busy > 2 * max(known)


# -- one device, whose host is not late ---------------------------------------------------------------------------------


def _slow_device(s: Snapshot, window: Window) -> Finding | None:
    """Return the finding of a rank whose device takes longer for the forward of DDP, by CUDA events; None if there is none.

    Its host launches as early as the others', so that arrivals do not show it. Devices leave the reduction of the gradients
    together, and nothing is waited for in the forward that follows.
    """
    ranks = [s.ranks[q] for q in window.ranks]
    if not window.inferred or not all(r.device_total_bytes and any(m.group for m in r.models) for r in ranks):
        return None
    columns = list(zip(*([part_ms(x, "forward") for x in window.steps[q]] for q in window.ranks), strict=True))
    at_top = [column.index(max(column)) for column in columns]
    top, count = Counter(at_top).most_common(1)[0]
    others_ms = [statistics.median_low(column[:top] + column[top + 1 :]) for column in columns]
    usual_ms = statistics.median(others_ms)
    excess_ms = statistics.median(column[top] - other for column, other in zip(columns, others_ms, strict=True))
    slow = ranks[top]
    step_ms = statistics.median(x.step_ms for x in window.steps[slow.rank])
    enough_ms = max(limits.least_ms, limits.device_share * step_ms, (limits.device_ratio - 1) * usual_ms)
    if count < limits.recurrence * len(columns) or excess_ms < enough_ms:
        return None
    return device_finding(s, window, slow, count, usual_ms, excess_ms, step_ms)


# -- the slowest rank changes ----------------------------------------------------------------------------------------


def _rotating(s: Snapshot, window: Window) -> Finding | None:
    ranks, columns, n = window.ranks, window.columns, len(window.columns)
    if n < limits.rotating_steps:
        return None
    tops = [column.index(max(column)) for column in columns]
    slowest = [ranks[at_top] for at_top in tops]
    changes = sum(a != b for a, b in itertools.pairwise(slowest))
    # of many ranks not every one is the slowest in so few steps: expect most of those that chance would pick
    by_chance = len(ranks) * (1 - (1 - 1 / len(ranks)) ** n)
    enough = len(ranks) if len(ranks) <= 8 else 0.75 * by_chance
    most = Counter(slowest).most_common(1)[0][1]
    if most > 0.6 * n or len(set(slowest)) < enough or changes < limits.rotating_changes * n:
        return None
    skew_ms = statistics.median(
        column[i] - statistics.median_low(column[:i] + column[i + 1 :]) for column, i in zip(columns, tops, strict=True)
    )
    step_ms = statistics.median(x.step_ms for x in window.steps[ranks[0]])
    if skew_ms < max(limits.rotating_ms, limits.rotating_share * step_ms):
        return None
    phase = max(PHASES, key=lambda p: statistics.median(_spread(window, p, i) for i in range(n)))
    excess = [
        part_ms(window.steps[slowest[i]][i], phase)
        / max(0.1, statistics.median_low([part_ms(window.steps[q][i], phase) for q in ranks if q != slowest[i]]))
        for i in range(n)
    ]
    if statistics.median(excess) < (3.0 if busy_host(s) else 1.5):
        return None
    if phase == "data" and 1.0 - least_fetching(s) < limits.rotating_share:
        return None
    return rotating_finding(s, window, phase, changes, skew_ms, step_ms)


def _spread(window: Window, phase: str, i: int) -> float:
    parts = [part_ms(window.steps[q][i], phase) for q in window.ranks]
    return max(parts) - min(parts)


# -- loops without an optimizer --------------------------------------------------------------------------------------


def _by_arrivals(s: Snapshot) -> Finding | None:
    by_group: dict[str, list[Arrival]] = {}
    for a in s.arrivals:
        group = s.groups.get(a.group) if a.op in JUDGED_BY_ARRIVAL else None
        if group is not None and len(group.ranks) == s.world_size:
            by_group.setdefault(a.group, []).append(a)
    for arrivals in by_group.values():
        recent = arrivals[-limits.arrivals :]
        if len(recent) < STEPS.least:
            continue
        q, count = Counter(a.late_rank for a in recent).most_common(1)[0]
        # entering an asynchronous operation late may cost nothing
        skew_ms = statistics.median(min(a.skew_ms, a.waited_ms) for a in recent)
        period_ms = (recent[-1].t_s - recent[0].t_s) * 1e3 / (len(recent) - 1)
        enough = skew_ms >= max(limits.least_ms, limits.arrivals_share * period_ms)
        if count >= limits.recurrence * len(recent) and enough and q in s.ranks:
            return arrival_finding(s, s.ranks[q], recent, count, skew_ms, period_ms)
    return None
