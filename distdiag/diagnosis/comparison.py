"""The comparator: one subset of ranks that differs from the rest, in which steps, by how much, at what cost.

A column has one number per rank: what each works in one step, ms. Three selectors of the time axis find the
subset: `persistent` (in nearly every step), `occasional` (in every n-th step, or irregularly but at a high
cost) and `rotating` (another rank in each step). `gain` is the cost with its interval. Whatever looks like a
difference and is none is a row of a rule's vetoes, which `vetoed` reads: so each has its reason.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from distdiag.diagnosis.model.findings import Abstained
from distdiag.diagnosis.step_times import LIMITS, Window
from distdiag.diagnosis.text.template import filled

_T = TypeVar("_T")

# -- vetoes ----------------------------------------------------------------------------------------------------------


class Veto(NamedTuple):
    """One reason for which a difference is not reported, or cannot be judged.

    Attributes:
        applies: True of a case in which it holds.
        why: Template (`text.template`) of the reason; `{c}` is the case.
        checked: The inputs were complete; else the kind counts as not checked.
        undecided: The ranks of a case that may differ all the same: counts as not checked, too, whatever was judged before.
    """

    applies: Callable[[Any], object]
    why: str
    checked: bool = True
    undecided: Callable[[Any], Iterable[int]] | None = None


def vetoed(vetoes: Iterable[Veto], case: object) -> Abstained | None:
    """Return the first veto that applies, as the reason of a rule; None if none does."""
    for veto in vetoes:
        if veto.applies(case):
            ranks = () if veto.undecided is None else tuple(veto.undecided(case))
            decided = veto.checked and not ranks
            return Abstained(filled(veto.why, c=case), checked=decided, undecided=bool(ranks), ranks=ranks)
    return None


@cache
def fewest_steps(ranks: int, recurrence: float, chance: float) -> int:
    """Return how many steps show that a rank which works longest in this share of them is no accident; at most those of a window.

    Args:
        chance: Of any one of `ranks` equal ranks to do so, at most.
    """
    for n in range(8, LIMITS.least):
        times = range(math.ceil(recurrence * n), n + 1)
        if ranks * sum(math.comb(n, k) * (ranks - 1) ** (n - k) / ranks**n for k in times) <= chance:
            return n
    return LIMITS.least


def newest(window: Window, recurrence: float, chance: float, sustained_s: float) -> Window | None:
    """Return the steps that show a rank which became slow lately, if they are fewer than a window needs."""
    lasting = math.ceil(sustained_s * 1e3 / max(1.0, window.step_ms(window.ranks[0])))
    n = max(fewest_steps(len(window.ranks), recurrence, chance), lasting)
    return Window({q: steps[-n:] for q, steps in window.steps.items()}, window.inferred) if n < LIMITS.least else None


# -- ranks that differ in one column ---------------------------------------------------------------------------------


def minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Return the ranks whose value fewer ranks have than the most frequent one."""
    times = Counter(values.values())
    most = max(times.values(), default=0)
    return tuple(sorted(rank for rank, value in values.items() if times[value] < most))


def by_step(values: Mapping[int, Mapping[int, _T]]) -> dict[int, dict[int, _T]]:
    """Return the values of all ranks by step, of the steps in which all are known, oldest first; `values`: by rank and step."""
    common = set.intersection(*map(set, values.values()))
    return {k: {rank: of[k] for rank, of in values.items()} for k in sorted(common)}


def above(values: Mapping[int, int], limit: Callable[[int], float]) -> tuple[tuple[int, ...], int]:
    """Return (ranks above the typical one by more than `limit` of it, that one). Over half are not named."""
    typical = statistics.median_low(values.values())
    odd = tuple(sorted(rank for rank, value in values.items() if value - typical > limit(typical)))
    return (odd if len(odd) <= len(values) // 2 else ()), typical


def leads(columns: Iterable[Sequence[float]]) -> list[tuple[int, float]]:
    """Return (index of the largest number, its distance from the next one) of each column."""
    found = []
    for column in columns:
        top = max(column)
        at_top = column.index(top)
        rest = max(max(column[:at_top], default=-math.inf), max(column[at_top + 1 :], default=-math.inf))
        found.append((at_top, top - rest))
    return found


def others(column: Sequence[float], index: int) -> float:
    """Return the typical number of the other ranks of a column."""
    return statistics.median_low([*column[:index], *column[index + 1 :]])


# -- selectors of the time axis --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subset:
    """Ranks that work longest, in the same steps.

    Attributes:
        indices: Positions of these steps in the window.
        gain_ms: Median milliseconds that the others would gain in such a step.
        step_ms: Median step time, ms.
        cost: Share of the time of all steps that is lost to them.
        period: They are slow in every n-th step; None if not.
    """

    ranks: list[int]
    indices: list[int]
    gain_ms: float
    step_ms: float
    cost: float = 0.0
    period: int | None = None


def persistent(window: Window, recurrence: float, least_ms: float, several: bool) -> Subset:
    """Return the rank that works longest most often, or several that do together.

    Several if no rank does in enough steps, or if what sets them apart from the rest is twice what sets the first apart from them.

    Args:
        recurrence: Share of the steps that is enough.
        least_ms: Milliseconds per step by which several must at least work longer.
        several: False: one rank only.
    """
    tops = leads(window.columns)
    index = Counter(at_top for at_top, _ in tops).most_common(1)[0][0]
    indices = [i for i, (at_top, _) in enumerate(tops) if at_top == index]
    ranks, gains = [window.ranks[index]], [gain for _, gain in tops]
    if several and (found := _together(window, least_ms, len(indices) >= recurrence * len(tops))):
        ranks, indices, gains = found
    return Subset(ranks, indices, statistics.median(gains), window.step_ms(ranks[0]))


def _together(window: Window, least_ms: float, one: bool) -> tuple[list[int], list[int], list[float]] | None:
    """Return (ranks, steps, gains) of the ranks that all work longer than the rest.

    Args:
        one: One of them works longest in enough steps.
    """
    ranks, columns, totals = window.ranks, window.columns, [sum(row) for row in window.rows]
    order = sorted(range(len(ranks)), key=lambda i: -totals[i])
    gaps = {k: totals[order[k - 1]] - totals[order[k]] for k in range(1, len(ranks))}
    k = max((k for k in gaps if k > 1), key=lambda k: gaps[k], default=0)
    if not k or gaps[k] < max(least_ms * len(columns), 2 * gaps[1] if one else 0.0):
        return None
    rest_ms = [max(column[i] for i in order[k:]) for column in columns]
    indices = [i for i, column in enumerate(columns) if min(column[j] for j in order[:k]) > rest_ms[i]]
    gains = [max(column) - rest for column, rest in zip(columns, rest_ms, strict=True)]
    return sorted(ranks[i] for i in order[:k]), indices, gains


OCCASIONAL_MS = 20.0  # that the others wait in such a step; less is jitter of the host
OCCASIONAL_FACTOR = 0.5  # the same, as a factor of a step that is not slow, and of what a typical slow one costs
OCCASIONAL_TIMES = 3  # long steps in the window: two intervals to compare
# Without a period, jitter of the host must be excluded: it hits all ranks, and rarely costs so much.
IRREGULAR_TIMES = 6  # long steps in the window; all of one rank by chance: once in 32 windows of two ranks
COSTLY = 0.2  # share of total time


def occasional(window: Window, recurrence: float) -> Subset | None:
    """Return the only rank with long steps, at regular intervals or often enough to matter.

    Args:
        recurrence: Share of the window's steps from which on a rank is slow in all; and of the steps at a multiple of the
            period that must be long.
    """
    steps, ranks = window.steps, window.ranks
    first = steps[ranks[0]]
    usual_ms = sorted(x.step_ms for x in first)[len(first) // 4]  # slow steps may be most of them
    slow: dict[int, tuple[int, float]] = {}
    for i, (at_top, gain_ms) in enumerate(leads(window.columns)):
        if gain_ms < max(OCCASIONAL_MS, OCCASIONAL_FACTOR * usual_ms):
            continue
        waited_ms = min(steps[q][i].wait_ms for q in ranks if q != ranks[at_top])
        if waited_ms >= 0.5 * gain_ms:
            slow[i] = ranks[at_top], gain_ms
    # next to long steps, much shorter ones are jitter of the host
    least_ms = OCCASIONAL_FACTOR * statistics.median(gain_ms for _, gain_ms in slow.values()) if slow else 0.0
    slow = {i: x for i, x in slow.items() if x[1] >= least_ms}
    if not OCCASIONAL_TIMES <= len(slow) <= recurrence * len(first) or len({q for q, _ in slow.values()}) > 1:
        return None
    gains = [gain_ms for _, gain_ms in slow.values()]
    cost = sum(gains) / sum(x.step_ms for x in first)
    gaps = [first[b].step - first[a].step for a, b in itertools.pairwise(slow)]
    period = min(gaps)
    complete = len(slow) >= recurrence * max(sum(gaps) / period + 1, len(first) // period)  # and in all of the window
    regular = period > 1 and complete and all(abs(gap - round(gap / period) * period) <= 1 for gap in gaps)
    if not regular and (cost < COSTLY or len(slow) < IRREGULAR_TIMES):
        return None
    rank = next(iter(slow.values()))[0]
    return Subset([rank], list(slow), statistics.median(gains), usual_ms, cost, period if regular else None)


def rotating(window: Window, least_steps: int, changes: float) -> tuple[int, Subset] | None:
    """Return (how often the slowest rank changes, the subset of all ranks), if each is the slowest in turn.

    Args:
        changes: Least changes of the slowest rank per step.
    """
    ranks, columns, n = window.ranks, window.columns, len(window.columns)
    if n < least_steps:
        return None
    tops = [at_top for at_top, _ in leads(columns)]
    changed = sum(a != b for a, b in itertools.pairwise(tops))
    # by chance each of 8 ranks is the slowest in one of 40 steps (99.5 %); of more ranks, expect most of those that chance picks
    by_chance = len(ranks) * (1 - (1 - 1 / len(ranks)) ** n)
    enough = len(ranks) if len(ranks) <= 8 else 0.75 * by_chance
    most = Counter(tops).most_common(1)[0][1]
    if most > 0.6 * n or len(set(tops)) < enough or changed < changes * n:
        return None
    skew_ms = statistics.median(column[i] - others(column, i) for column, i in zip(columns, tops, strict=True))
    return changed, Subset(ranks, tops, skew_ms, window.step_ms(ranks[0]))


def arrives_last(window: Window, slow: Sequence[int], recurrence: float) -> bool:
    """True if slow ranks are the last at a synchronisation in this share of the steps, or none was timed.

    Ranks leave the first one together (in DDP with buffers, the forward's broadcast): there the last one
    alone does not show who was late.
    """
    ranks, steps, timed = window.ranks, window.steps, False
    for times in ([[x.arrived_s for x in steps[q]] for q in ranks], [[x.ready_s for x in steps[q]] for q in ranks]):
        known = [column for column in zip(*times, strict=True) if None not in column]
        if len(known) <= len(window.columns) // 2:
            continue
        timed = True
        if sum(ranks[column.index(max(column))] in slow for column in known) >= recurrence * len(known):
            return True
    return not timed


# -- cost ------------------------------------------------------------------------------------------------------------

BLOCKS = 5  # with ten, intervals are up to a fifth too narrow for steps as autocorrelated as on a busy machine
T_95 = 2.78  # of Student's t with four degrees of freedom
LEAST_STEPS = 20


class Gain(NamedTuple):
    """A share of step time, and its 95 % interval."""

    share: float
    low: float
    high: float


def blocks(n: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the few blocks of `n` steps for an interval: steps are autocorrelated."""
    return itertools.pairwise(round(k * n / BLOCKS) for k in range(BLOCKS + 1))


def half_interval(means: Sequence[float]) -> float:
    """Return half the 95 % interval of a later measurement of as many steps, from the means of blocks.

    It has two errors of equal size, of the recorded steps and of the later ones. Both include what all ranks
    have in common, as the load of the machine; a load that changes more slowly than the recorded steps last
    is not in them.
    """
    return T_95 * math.sqrt(2 / BLOCKS) * statistics.stdev(means)


def gain(window: Window, slow: Sequence[int]) -> Gain | None:
    """Return the share of step time that would be saved if each of `slow` worked as long as a
    typical other rank.

    A step lasts as long as its slowest rank works, so each recorded step is computed again with a typical
    other rank's work in place of the slow rank's. That work is from another step of the block, far away, as
    neighbours have similar work: within the same step it would never be the longest, and the gain would be
    too large.

    None if all ranks are slow, or the steps are too few for an interval.
    """
    at = [i for i, q in enumerate(window.ranks) if q in slow]
    rest = [i for i in range(len(window.ranks)) if i not in at]
    columns, n = window.columns, len(window.columns)
    steps_ms = [max(x.step_ms for x in of_step) for of_step in zip(*window.steps.values(), strict=True)]
    if not at or not rest or n < LEAST_STEPS or sum(steps_ms) <= 0:
        return None
    typical = sorted(rest, key=lambda i: sum(window.rows[i]))[(len(rest) - 1) // 2]
    without_ms: list[list[float]] = []  # the step times without the slow ranks, by block
    for first, end in blocks(n):
        size = end - first
        other = [columns[first + (k + size // 2) % size][typical] for k in range(size)]
        without_ms.append([])
        for k, column in enumerate(columns[first:end]):
            as_others = (other[(k + j) % size] for j in range(len(at)))
            longest_ms = max(*(column[i] for i in rest), *as_others)
            without_ms[-1].append(steps_ms[first + k] - max(column) + longest_ms)
    recorded_ms = statistics.fmean(steps_ms)
    share = 1 - statistics.fmean(itertools.chain(*without_ms)) / recorded_ms
    half = half_interval([statistics.fmean(block) for block in without_ms]) / recorded_ms
    return Gain(share, share - half, share + half)
