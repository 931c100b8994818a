"""Estimates what a job would gain if a rank were as fast as the others, with an interval.

A step lasts as long as its slowest rank works. So each recorded step is computed again with a typical other rank's work in place
of the slow rank's. That work is taken from another step: within the same step it would never be the longest, and the gain would
be too large.

The interval is for what a measurement would show: the mean of as many steps without the slow rank, compared with the recorded
ones. So it has two errors of equal size, that of the recorded steps and that of the later ones. Both include what all ranks have in
common, as the load of the machine. Step times are autocorrelated, so the error is taken from the means of a few long blocks. A
load that changes more slowly than the recorded steps last cannot be seen in them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from distdiag.diagnosis.step_times import Window

BLOCKS = 5  # with ten, intervals are up to a fifth too narrow for steps as autocorrelated as on a busy machine
T_95 = 2.78  # of Student's t with four degrees of freedom
LEAST_STEPS = 20


@dataclass(frozen=True)
class Gain:
    """A share of step time, and its 95 % interval."""

    share: float
    low: float
    high: float


def gain(window: Window, slow: Sequence[int]) -> Gain | None:
    """Return the share of step time that would be saved if each of `slow` worked as long as a typical other rank.

    None if all ranks are slow, or the steps are too few for an interval.
    """
    at = [i for i, q in enumerate(window.ranks) if q in slow]
    rest = [i for i in range(len(window.ranks)) if i not in at]
    columns, n = window.columns, len(window.columns)
    if not at or not rest or n < LEAST_STEPS:
        return None
    typical = sorted(rest, key=lambda i: sum(window.rows[i]))[(len(rest) - 1) // 2]
    steps_ms = [max(x.step_ms for x in of_step) for of_step in zip(*window.steps.values(), strict=True)]
    recorded_ms = statistics.fmean(steps_ms)
    if recorded_ms <= 0:
        return None
    without_ms: list[float] = []  # the step times without the slow ranks
    means_ms: list[float] = []
    ends = [round(k * n / BLOCKS) for k in range(BLOCKS + 1)]
    for first, end in itertools.pairwise(ends):
        # Another step of the same block, so that blocks stay independent; far away, as neighbours have similar work.
        other = [columns[first + (k + (end - first) // 2) % (end - first)][typical] for k in range(end - first)]
        block = []
        for k in range(end - first):
            column = columns[first + k]
            as_others = (other[(k + j) % (end - first)] for j in range(len(at)))
            block.append(steps_ms[first + k] - max(column) + max(*(column[i] for i in rest), *as_others))
        without_ms += block
        means_ms.append(statistics.fmean(block))
    error_ms = statistics.stdev(means_ms) / math.sqrt(BLOCKS)
    share, half = 1 - statistics.fmean(without_ms) / recorded_ms, T_95 * math.sqrt(2) * error_ms / recorded_ms
    return Gain(share, share - half, share + half)
