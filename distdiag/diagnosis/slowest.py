"""Finds the ranks of a window that work longest, and whether they arrive last."""

from __future__ import annotations

from collections import Counter

from distdiag.diagnosis.step_times import Window


def slowest(window: Window) -> tuple[list[int], int, list[float]]:
    """Return ([the rank that most often works longest], in how many steps, milliseconds that the others would gain in each)."""
    at_the_top: Counter[int] = Counter()
    gains: list[float] = []
    for column in window.columns:
        top = max(column)
        at_top = column.index(top)
        at_the_top[window.ranks[at_top]] += 1
        gains.append(top - max(max(column[:at_top], default=0.0), max(column[at_top + 1 :], default=0.0)))
    q, count = at_the_top.most_common(1)[0]
    return [q], count, gains


def slow_together(window: Window, least_ms: float) -> tuple[list[int], int, list[float]]:
    """Return the same for several ranks, at most half of them, that all work longer than the rest: a slow node, for example.

    Args:
        least_ms: Milliseconds per step by which they must at least work longer.
    """
    ranks, columns = window.ranks, window.columns
    totals = [sum(row) for row in window.rows]
    order = sorted(range(len(ranks)), key=lambda i: -totals[i])
    k = max(range(2, len(ranks) // 2 + 1), key=lambda k: totals[order[k - 1]] - totals[order[k]], default=0)
    if not k or totals[order[k - 1]] - totals[order[k]] < least_ms * len(columns):
        return [], 0, []
    slow, rest = order[:k], order[k:]
    count, gains = 0, []
    for column in columns:
        usual = max(column[i] for i in rest)
        count += min(column[i] for i in slow) > usual
        gains.append(max(column) - usual)
    return sorted(ranks[i] for i in slow), count, gains


def arrives_last(window: Window, slow: list[int], recurrence: float) -> bool:
    """True if the slow ranks are usually the last at a synchronisation of the steps, or none was timed on all ranks.

    Ranks leave the first one together (in DDP with buffers, the forward's broadcast): there the last one alone does not
    show who was late.

    Args:
        recurrence: Share of the steps in which they must be last.
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
