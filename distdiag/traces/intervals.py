"""Sets of time intervals: union, difference, length. All take n log n."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]], low: float, high: float) -> Spans:
    """Return the disjoint, sorted intervals that `spans` cover between `low` and `high`."""
    out: Spans = []
    for start, end in sorted((max(a, low), min(b, high)) for a, b in spans if b > low and a < high):
        if out and start <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = out[-1][0], end
        elif end > start:
            out.append((start, end))
    return out


def without(spans: Spans, taken: Spans) -> Spans:
    """Return what of disjoint, sorted `spans` lies outside `taken`."""
    out: Spans = []
    j = 0
    for start, end in spans:
        while j < len(taken) and taken[j][1] <= start:
            j += 1
        k = j
        while k < len(taken) and taken[k][0] < end:
            if taken[k][0] > start:
                out.append((start, taken[k][0]))
            start = max(start, taken[k][1])
            k += 1
        if start < end:
            out.append((start, end))
    return out


def length(spans: Spans) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in spans)


class Coverage:
    """How much of a span is covered by disjoint, sorted intervals: log n a question."""

    def __init__(self, spans: Spans) -> None:
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        self._before = [0.0, *accumulate(end - start for start, end in spans)]

    def within(self, low: float, high: float) -> float:
        """Return the length of the intervals between `low` and `high`."""
        first, last = bisect_right(self._ends, low), bisect_left(self._starts, high)
        if first >= last:
            return 0.0
        cut = max(0.0, low - self._starts[first]) + max(0.0, self._ends[last - 1] - high)
        return self._before[last] - self._before[first] - cut
