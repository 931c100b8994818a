"""Estimates what a job would gain if a rank were as fast as the others, with an interval.

A step lasts as long as its slowest rank works. So each recorded step is computed again with a typical other rank's work in place
of the slow rank's. That work is taken from the neighbouring step: within the same step it would never be the longest, and the
gain would be too large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from distdiag.diagnosis.step_times import Window

BLOCKS = 10  # neighbouring steps depend on each other, so the interval is over blocks of them
T_95 = 2.26  # of Student's t with nine degrees of freedom


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
    if not at or not rest or n < 2 * BLOCKS:
        return None
    typical = sorted(rest, key=lambda i: sum(window.rows[i]))[(len(rest) - 1) // 2]
    saved = []
    for nth, column in enumerate(columns):
        as_others = (columns[(nth + 1 + k) % n][typical] for k in range(len(at)))
        saved.append(max(column) - max(*(column[i] for i in rest), *as_others))
    steps_ms = [max(x.step_ms for x in of_step) for of_step in zip(*window.steps.values(), strict=True)]
    return _interval(saved, steps_ms)


def _interval(saved: Sequence[float], steps_ms: Sequence[float]) -> Gain | None:
    """Return sum(saved) / sum(steps_ms) with its interval, leaving out one block at a time (jackknife)."""
    n, saved_ms, total_ms = len(saved), sum(saved), sum(steps_ms)
    if total_ms <= 0:
        return None
    ends = [round(k * n / BLOCKS) for k in range(BLOCKS + 1)]
    without = [
        (saved_ms - sum(saved[a:b])) / max(1e-9, total_ms - sum(steps_ms[a:b])) for a, b in itertools.pairwise(ends)
    ]
    mean = sum(without) / BLOCKS
    error = math.sqrt((BLOCKS - 1) / BLOCKS * sum((x - mean) ** 2 for x in without))
    share, half = saved_ms / total_ms, T_95 * error
    return Gain(share, share - half, share + half)
