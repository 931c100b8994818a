"""Finds a rank with occasional long steps: at a fixed period (every 15th step, when it logs something) or irregularly.

A step is due at a multiple of the period.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from distdiag.diagnosis.step_times import Window

LEAST_MS = 20.0  # that the others wait in such a step; less is jitter of the host
LEAST_FACTOR = 0.5  # the same, as a factor of a step that is not slow
LEAST_TIMES = 3  # long steps in the window: two intervals to compare
MOST_SHARE = 0.75  # of the window's steps: a rank that is slow in more is slow in all
PRESENT = 0.75  # share of due steps that are long
LEAST_COST = 0.03  # share of total time
# Without a period, jitter of the host must be excluded: it hits all ranks, and rarely costs so much.
IRREGULAR_TIMES = 6  # long steps in the window; all of one rank by chance: once in 32 windows of two ranks
IRREGULAR_COST = 0.2  # share of total time


@dataclass(frozen=True)
class Periodic:
    """A rank that is slow in every `period`-th step, or irregularly.

    Attributes:
        period: Steps; None if the slow steps have no period.
        indices: Positions of the slow steps in the window.
        gain_ms: Median milliseconds that the others wait for it in a slow step.
        cost: Share of the time of all steps that is lost to it.
    """

    rank: int
    period: int | None
    indices: list[int]
    gain_ms: float
    cost: float


def periodic(window: Window) -> Periodic | None:
    """Return the only rank with long steps, at regular intervals or often enough to matter; None if there is none."""
    steps, ranks = window.steps, window.ranks
    first = steps[ranks[0]]
    usual_ms = sorted(x.step_ms for x in first)[len(first) // 4]  # slow steps may be most of them
    slow: list[tuple[int, int, float]] = []
    for i, column in enumerate(window.columns):
        top = max(column)
        at_top = column.index(top)
        gain_ms = top - max(column[:at_top] + column[at_top + 1 :])
        waited_ms = min(steps[q][i].wait_ms for q in ranks if q != ranks[at_top])
        if gain_ms >= max(LEAST_MS, LEAST_FACTOR * usual_ms) and waited_ms >= 0.5 * gain_ms:
            slow.append((i, ranks[at_top], gain_ms))
    if not LEAST_TIMES <= len(slow) <= MOST_SHARE * len(first) or len({q for _, q, _ in slow}) > 1:
        return None
    gaps = [first[b].step - first[a].step for (a, _, _), (b, _, _) in itertools.pairwise(slow)]
    period = min(gaps)
    complete = len(slow) >= PRESENT * (sum(gaps) / period + 1)
    cost = sum(gain for _, _, gain in slow) / sum(x.step_ms for x in first)
    if cost < LEAST_COST:
        return None
    if period == 1 or not complete or any(abs(gap - round(gap / period) * period) > 1 for gap in gaps):
        if len(slow) < IRREGULAR_TIMES or cost < IRREGULAR_COST:
            return None
        period = None
    return Periodic(slow[0][1], period, [i for i, _, _ in slow], statistics.median(gain for _, _, gain in slow), cost)
