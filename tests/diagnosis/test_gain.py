"""The estimated gain without a straggler, compared with the same steps without it."""

from __future__ import annotations

import random
import statistics

import pytest

from distdiag.diagnosis.gain import gain
from distdiag.diagnosis.model.snapshot import Step
from distdiag.diagnosis.step_times import Window


def window(self_ms: list[list[float]]) -> Window:
    """Return steps from the work of each rank (rows): a step takes as long as its longest work, plus 3 ms of communication."""
    steps_ms = [max(column) + 3.0 for column in zip(*self_ms, strict=True)]
    return Window({
        rank: [Step(i, 0.0, s, 0.0, 0.0, 0.0, 0.0, s - own, 0.0, None, 0, 0, None) for i, (own, s) in enumerate(zip(row, steps_ms, strict=True))]
        for rank, row in enumerate(self_ms)
    })  # fmt: skip


def step_ms(self_ms: list[list[float]]) -> float:
    return statistics.mean(max(column) + 3.0 for column in zip(*self_ms, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_interval_contains_the_true_gain(ranks: int) -> None:
    rng, held, errors = random.Random(ranks), 0, []
    for _ in range(60):
        delay = rng.uniform(2.0, 30.0)
        equal = [[rng.gauss(20.0, 2.0) for _ in range(1_500)] for _ in range(ranks)]
        slow = [[w + (rng.gauss(delay, delay / 10) if q == 1 else 0.0) for w in row] for q, row in enumerate(equal)]
        truth = 1 - step_ms(equal) / step_ms(slow)
        found = gain(window([row[:50] for row in slow]), [1])
        assert found is not None
        held += found.low <= truth <= found.high
        errors.append(found.share - truth)
    assert held >= 52
    assert abs(statistics.mean(errors)) < 0.01  # no bias from taking the maximum of few values


def test_equal_ranks_have_no_gain() -> None:
    rng = random.Random(0)
    found = gain(window([[rng.gauss(20.0, 2.0) for _ in range(50)] for _ in range(4)]), [2])
    assert found is not None
    assert found.low <= 0 <= found.high


def test_without_other_ranks_or_enough_steps_there_is_no_gain() -> None:
    two = window([[1.0] * 50, [2.0] * 50])
    assert gain(two, [0, 1]) is None
    assert gain(two, []) is None
    assert gain(window([[1.0] * 19, [2.0] * 19]), [1]) is None
