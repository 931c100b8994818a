"""Step times of the ranks, compared over the same steps.

In a synchronous job every rank has the same step time; the slow rank is the one that waits least. So ranks are compared
by `self = step - wait`, each with the median (the lower one) of the others: with two ranks the faster is the reference.

On NCCL no host waits inside a collective, so its wait is not measured. There it is inferred: all ranks leave the last
synchronisation of a step together, so a rank waits from its own arrival until the last rank's. That holds while hosts wait
for their devices at least once a step; if they run ahead for longer, nothing is known.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

import msgspec

from distdiag.diagnosis.model.findings import Abstained, rank_list
from distdiag.diagnosis.model.snapshot import WARM_STEPS, Life, RankState, Snapshot, Step

PHASES = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Limits:
    """How much of the steps is compared."""

    window: int = 50  # most steps that are compared
    least: int = 30  # steps that all ranks must have in common before anything is judged
    many_ranks: int = 256  # with more, the least is enough, and stays cheap
    warm_up: int = 5  # first steps of a job, which are left out: compilation, caches, allocator
    settled: int = 50  # first steps, in which kernels are built and caches fill: pauses there say nothing about a rank
    arrived: float = 0.9  # share of steps whose arrival is known on all ranks, before waits are inferred from it
    busy_host_pct: float = 85.0  # use of all cores; above, ranks compete for them, and their jitter is no evidence


LIMITS = Limits()


@dataclass(frozen=True)
class Window:
    """The same last steps of every rank."""

    steps: dict[int, list[Step]]
    inferred: bool = False  # waits are inferred from arrivals: they hold no communication, only lateness

    @cached_property
    def ranks(self) -> list[int]:
        return sorted(self.steps)

    def step_ms(self, rank: int) -> float:
        """Return the median step time of a rank, ms."""
        return statistics.median(x.step_ms for x in self.steps[rank])

    @cached_property
    def rows(self) -> list[list[float]]:
        """`self_ms` of every rank."""
        # written out: for a thousand ranks, function calls would take a third of the time
        return [[ms if (ms := x.step_ms - x.wait_ms) > 0.0 else 0.0 for x in self.steps[q]] for q in self.ranks]

    @cached_property
    def columns(self) -> list[tuple[float, ...]]:
        """`self_ms` of every step, by rank."""
        return list(zip(*self.rows, strict=True))

    def without(self, indices: Collection[int]) -> Window:
        """Return the same without the steps at these positions."""
        steps = {q: [x for i, x in enumerate(of) if i not in indices] for q, of in self.steps.items()}
        return Window(steps, self.inferred)

    def parts(self, phase: str) -> list[tuple[float, ...]]:
        """Return `part_ms` of every step, by rank."""
        return list(zip(*([part_ms(x, phase) for x in self.steps[q]] for q in self.ranks), strict=True))


def window(s: Snapshot) -> Window | Abstained:
    """Return the same last steps of every rank, without the first of the job; of a job in which some ranks make none, of the others."""
    ranks = [r for r in s.ranks.values() if r.life in (Life.RUNNING, Life.FINISHED)]
    if len(ranks) < 2:
        return Abstained("there is one rank only" if s.world_size < 2 else "fewer than two ranks are running")
    if len(ranks) < s.world_size:
        return Abstained(f"{len(ranks)} of {s.world_size} ranks are running")
    found = _common(_team(s, ranks))
    if isinstance(found, Abstained) or all(r.wait_measured for r in ranks):
        return found
    on_device = "the waits for other ranks are on the device, and "
    if any(r.p2p_issued for r in ranks):
        return Abstained(on_device + "ranks that exchange messages differ by design")
    if not all(_synchronises(s, r, found.steps[r.rank]) for r in ranks):
        return Abstained(on_device + "not every step has a collective of all ranks")
    return _with_inferred_waits(found, device_clocks=any(r.device_total_bytes for r in ranks))


def _team(s: Snapshot, ranks: list[RankState]) -> list[RankState]:
    """Return the ranks that make optimizer steps, if they are a group of DDP and others make none: all ranks else."""
    train = [r for r in ranks if r.step]
    team = tuple(r.rank for r in train)
    groups = {s.groups[m.group].ranks if m.group in s.groups else () for r in train for m in r.models}
    alone = 1 < len(train) < len(ranks) and groups == {team} and all(r.models for r in train)
    return train if alone and all(r.wait_measured for r in train) else ranks


def _common(ranks: list[RankState]) -> Window | Abstained:
    most = LIMITS.window if len(ranks) <= LIMITS.many_ranks else LIMITS.least
    # fast path: every rank has all of its last steps, so both ends of the window are known
    if all(r.steps and r.steps[-1].step - r.steps[0].step == len(r.steps) - 1 for r in ranks):
        last = min(r.steps[-1].step for r in ranks)
        first = max(last - most, LIMITS.warm_up, *(r.steps[0].step - 1 for r in ranks)) + 1
        n = last - first + 1
        found = {r.rank: list(r.steps[first - r.steps[0].step : last - r.steps[0].step + 1]) for r in ranks}
    else:
        common = set.intersection(*({x.step for x in r.steps if x.step > LIMITS.warm_up} for r in ranks))
        wanted = set(sorted(common)[-most:])
        n = len(wanted)
        found = {r.rank: [x for x in r.steps if x.step in wanted] for r in ranks}
    if n >= LIMITS.least:
        return Window(found)
    train = [r.rank for r in ranks if r.step]
    if len(train) < len(ranks) and max(r.step for r in ranks) > LIMITS.least:
        return Abstained(f"only {rank_list(train)} {'makes' if len(train) == 1 else 'make'} optimizer steps")
    return Abstained(f"{max(0, n)} of {LIMITS.least} steps after the warm-up")


def _synchronises(s: Snapshot, r: RankState, steps: list[Step]) -> bool:
    """True if this rank synchronises with all others in its steps, as far back as its calls are known: by DDP or by a call.

    If teams average among themselves, or ranks average every tenth step, arrivals do not show who waits.
    """
    if any(s.whole(m.group) and m.synced_backwards for m in r.models):
        return True
    calls = [c for c in r.calls if c.seq is not None and c.entered_s is not None]
    if not calls:  # C++ issues them: functional collectives, compiled code
        return sum(r.enqueued.get(name, 0) for name in s.groups if s.whole(name)) >= r.step
    entered = [c.entered_s or 0.0 for c in calls if s.whole(c.group)]
    known = [x for x in steps if x.end_s - x.step_ms / 1e3 >= (calls[0].entered_s or 0.0)]
    count = sum(any(x.end_s - x.step_ms / 1e3 <= t <= x.end_s for t in entered) for x in known)
    return count >= LIMITS.arrived * len(known) if known else bool(entered)


def _with_inferred_waits(window: Window, device_clocks: bool) -> Window | Abstained:
    """Return the window with each rank's wait from its arrival at the last synchronisation of a step to the last rank's.

    Args:
        device_clocks: Phases are timed on the device, by CUDA events.
    """
    ready = list(zip(*([x.ready_s for x in window.steps[q]] for q in window.ranks), strict=True))
    known = [i for i, column in enumerate(ready) if None not in column]
    if len(known) < LIMITS.arrived * len(ready):
        return Abstained("the waits for other ranks are on the device, and no synchronisation of the steps was timed")
    last = {i: max(t for t in ready[i] if t is not None) for i in known}
    waits: dict[int, list[float]] = {}
    steps: dict[int, list[Step]] = {}
    for q in window.ranks:
        steps[q] = [window.steps[q][i] for i in known]
        late_ms = [(last[i] - (x.ready_s or 0.0)) * 1e3 for i, x in zip(known, steps[q], strict=True)]
        if statistics.median(late_ms) >= statistics.median(x.step_ms for x in steps[q]):
            return Abstained("the hosts run ahead of their devices by more than a step: arrivals show no waiting")
        # what the host did wait, as in the end of backward, is measured already
        waits[q] = [max(0.0, min(ms, x.step_ms) - x.wait_ms) for ms, x in zip(late_ms, steps[q], strict=True)]
    phase = _phase_with_waits(steps, waits, device_clocks)
    for q, rows in steps.items():
        # `part_ms` subtracts the rest of the wait, which was measured, from backward and other
        steps[q] = [
            msgspec.structs.replace(
                x, wait_ms=x.wait_ms + ms, forward_wait_ms=x.forward_wait_ms + ms,
                **{f"{phase}_ms": max(0.0, getattr(x, f"{phase}_ms") - ms)},
            )
            for x, ms in zip(rows, waits[q], strict=True)
        ]  # fmt: skip
    return Window(steps, inferred=True)


def _phase_with_waits(steps: dict[int, list[Step]], waits: dict[int, list[float]], device_clocks: bool) -> str:
    """Return the phase in which hosts most likely wait.

    Without its waits, that phase leaves the last rank's phases at least as long as the others'. With CUDA events the wait for
    gradients is in backward; without, in the phase that reads a result.
    """
    order = ("backward", "other", "optimizer", "data", "forward")
    order = order if device_clocks else (*order[1:], order[0])
    usual = {q: {p: statistics.median(part_ms(x, p) for x in rows) for p in PHASES} for q, rows in steps.items()}
    wait = {q: statistics.median(ms) for q, ms in waits.items()}
    last = min(wait, key=lambda q: wait[q])
    others = [q for q in steps if q != last]

    def shortfall(phase: str) -> float:
        """Return milliseconds by which the last rank's phases are shorter, plus the waits that do not fit into `phase`."""
        total = 0.0
        for p in PHASES:
            theirs = statistics.median_low([usual[q][p] - (wait[q] if p == phase else 0.0) for q in others])
            total += max(0.0, theirs - usual[last][p]) + max(0.0, -theirs)
        return total

    least = min(map(shortfall, order))
    tolerance = 0.2 * statistics.median(wait[q] for q in others)
    return next(p for p in order if shortfall(p) <= least + tolerance)


def share_of_all(window: Window, part_ms: Callable[[Step], float], least: float) -> float:
    """Return the share of step time that every rank loses to a part of it: the smallest of all ranks, 0 if below `least`."""
    share = 1.0
    for steps in window.steps.values():
        total_ms = sum([x.step_ms for x in steps])
        share = min(share, sum([part_ms(x) for x in steps]) / total_ms if total_ms > 0 else 0.0)
        if share < least:  # most jobs end here, at the first rank
            return 0.0
    return share


def self_ms(x: Step) -> float:
    """Return a step's time without its waiting in collectives, ms."""
    return ms if (ms := x.step_ms - x.wait_ms) > 0.0 else 0.0


def mean_step_s(r: RankState) -> float | None:
    """Return the mean time of a rank's steps since it is warm, pauses included; None if not known."""
    n = r.step - WARM_STEPS
    return (r.steps[-1].end_s - r.warm_since_s) / n if n > 0 and r.steps and r.warm_since_s is not None else None


def part_ms(x: Step, phase: str) -> float:
    """Return one phase of a step without its waiting (which is in backward, or in the collectives of `other`), ms."""
    waited = x.wait_ms - x.forward_wait_ms - x.optimizer_wait_ms
    if phase == "backward":
        return max(0.0, x.backward_ms - waited)
    if phase == "other":
        return max(0.0, x.other_ms - max(0.0, waited - x.backward_ms))
    return getattr(x, f"{phase}_ms")
