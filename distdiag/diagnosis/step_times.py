"""Step times of the ranks, compared over the same steps.

In a synchronous job every rank has the same step time; the slow rank is the one that waits least. So ranks are compared
by `self = step - wait`, each with the median (the lower one) of the others: with two ranks the faster is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from distdiag.diagnosis.model.findings import Abstained
from distdiag.diagnosis.model.snapshot import Life, Snapshot, Step

PHASES = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Limits:
    """How much of the steps is compared."""

    window: int = 50  # steps: the most that are compared
    window_of_many: int = (
        32  # steps, with `many_ranks` or more: seen in so many ranks it needs fewer, and must stay cheap
    )
    many_ranks: int = 256
    least: int = 30  # steps that all ranks must have in common before anything is judged
    warm_up: int = 5  # first steps of a job, which are left out: compilation, caches, allocator


LIMITS = Limits()


@dataclass(frozen=True)
class Window:
    """The same last steps of every rank."""

    steps: dict[int, list[Step]]

    @cached_property
    def ranks(self) -> list[int]:
        return sorted(self.steps)

    @cached_property
    def rows(self) -> list[list[float]]:
        """`self_ms` of every rank."""
        # spelled out: for a thousand ranks the calls alone would take a third of the time
        return [[ms if (ms := x.step_ms - x.wait_ms) > 0.0 else 0.0 for x in self.steps[q]] for q in self.ranks]

    @cached_property
    def columns(self) -> list[tuple[float, ...]]:
        """`self_ms` of every step, by rank."""
        return list(zip(*self.rows, strict=True))


def window(s: Snapshot) -> Window | Abstained:
    """Return the same last steps of every rank, without the first of the job."""
    ranks = [r for r in s.ranks.values() if r.life in (Life.RUNNING, Life.FINISHED)]
    if len(ranks) < 2:
        return Abstained("there is one rank only" if s.world_size < 2 else "fewer than two ranks are running")
    if not all(r.wait_measured for r in ranks):
        return Abstained("the waits for other ranks lie on the device, and nothing measures them")
    if len(ranks) < s.world_size:
        return Abstained(f"{len(ranks)} of {s.world_size} ranks are running")
    most = LIMITS.window if len(ranks) <= LIMITS.many_ranks else LIMITS.window_of_many
    # usually every rank has all of its last steps: then both ends of the window are known without sets
    if all(r.steps and r.steps[-1].step - r.steps[0].step == len(r.steps) - 1 for r in ranks):
        last = min(r.steps[-1].step for r in ranks)
        first = max(last - most, LIMITS.warm_up, *(r.steps[0].step - 1 for r in ranks)) + 1
        if last - first + 1 < LIMITS.least:
            return _too_few(last - first + 1)
        return Window({r.rank: list(r.steps[first - r.steps[0].step : last - r.steps[0].step + 1]) for r in ranks})
    common = set.intersection(*({x.step for x in r.steps if x.step > LIMITS.warm_up} for r in ranks))
    steps = sorted(common)[-most:]
    if len(steps) < LIMITS.least:
        return _too_few(len(steps))
    wanted = set(steps)
    return Window({r.rank: [x for x in r.steps if x.step in wanted] for r in ranks})


def _too_few(steps: int) -> Abstained:
    return Abstained(f"{max(0, steps)} of {LIMITS.least} steps after the warm-up")


def self_ms(x: Step) -> float:
    """Return a step's time without its waiting in collectives, ms."""
    return ms if (ms := x.step_ms - x.wait_ms) > 0.0 else 0.0


def part_ms(x: Step, phase: str) -> float:
    """Return one phase of a step without the waiting in it (which is in backward, or in the collectives of `other`), ms."""
    waited = x.wait_ms - x.forward_wait_ms
    if phase == "backward":
        return max(0.0, x.backward_ms - waited)
    if phase == "other":
        return max(0.0, x.other_ms - max(0.0, waited - x.backward_ms))
    return getattr(x, f"{phase}_ms")
