"""Quantiles of a few values, without numpy: a screen opens faster than numpy is imported."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """Return the value at share `q` of a sorted sequence (nearest rank, the lower one); None if it is empty."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def median_low(values: Sequence[float]) -> float | None:
    """Return the lower median: with two ranks the faster one is the reference."""
    return quantile(sorted(values), 0.5)
