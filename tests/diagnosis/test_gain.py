"""The estimated gain without a straggler, compared with steps without it."""

from __future__ import annotations

import random
import statistics

import pytest

from distdiag.diagnosis.comparison import gain
from distdiag.diagnosis.model.snapshot import Step
from distdiag.diagnosis.step_times import Window

RECORDED = 200


def window(work: list[list[float]], comm: list[float]) -> Window:
    """Return steps from the work of each rank (rows): a step takes as long as its longest work, plus its communication."""
    steps_ms = [max(column) + c for column, c in zip(zip(*work, strict=True), comm, strict=True)]
    return Window({
        rank: [Step(i, 0.0, s, 0.0, 0.0, 0.0, 0.0, s - own, 0.0, None, 0, 0, None) for i, (own, s) in enumerate(zip(row, steps_ms, strict=True))]
        for rank, row in enumerate(work)
    })  # fmt: skip


def autocorrelated(rng: random.Random, n: int, rho: float, sd: float) -> list[float]:
    out = [rng.gauss(0, sd)]
    while len(out) < n:
        out.append(rho * out[-1] + rng.gauss(0, sd * (1 - rho * rho) ** 0.5))
    return out


def trials(ranks: int, own_rho: float, load_rho: float, load_sd: float, recorded: int) -> tuple[float, float]:
    """Return how often the interval holds what the next steps without the delay show, and the mean error.

    Args:
        own_rho: From one step to the next, correlation of a rank's own work (20 ms, 2 ms standard deviation).
        load_rho, load_sd: The same of a factor that slows all ranks together.
    """
    rng, held, errors, n = random.Random(ranks), 0, [], 200
    for _ in range(n):
        delay = rng.uniform(3.0, 30.0)
        load = [1 + x for x in autocorrelated(rng, 2 * recorded, load_rho, load_sd)]
        comm = [f * (3 + abs(rng.gauss(0, 0.5))) for f in load]
        work = [
            [f * (20 + x) for f, x in zip(load, autocorrelated(rng, 2 * recorded, own_rho, 2.0), strict=True)]
            for _ in range(ranks)
        ]
        later = [max(column) + c for column, c in zip(zip(*work, strict=True), comm, strict=True)][recorded:]
        work[1] = [w + f * rng.gauss(delay, delay / 10) for f, w in zip(load, work[1], strict=True)]
        slow = window([row[:recorded] for row in work], comm[:recorded])
        truth = 1 - statistics.fmean(later) / statistics.fmean(x.step_ms for x in slow.steps[0])
        found = gain(slow, [1])
        assert found is not None
        held += found.low <= truth <= found.high
        errors.append(found.share - truth)
    return held / n, statistics.fmean(errors)


@pytest.mark.parametrize(
    ("ranks", "own_rho", "load_rho", "load_sd"),
    [(2, 0.0, 0.0, 0.0), (2, 0.5, 0.0, 0.0), (2, 0.5, 0.8, 0.03), (4, 0.5, 0.8, 0.03)],
    ids=["independent", "autocorrelated", "drift", "drift of 4 ranks"],
)
def test_the_interval_contains_what_is_measured_later(
    ranks: int, own_rho: float, load_rho: float, load_sd: float
) -> None:
    share, error = trials(ranks, own_rho, load_rho, load_sd, RECORDED)
    assert share >= 0.95
    assert abs(error) < 0.003  # no bias from taking the maximum of few values, or of similar neighbours


def test_the_interval_of_few_steps_is_nearly_as_good() -> None:
    share, error = trials(2, 0.5, 0.8, 0.03, 50)
    assert share >= 0.9
    assert abs(error) < 0.004


def test_equal_ranks_have_no_gain() -> None:
    rng = random.Random(0)
    found = gain(window([[rng.gauss(20.0, 2.0) for _ in range(50)] for _ in range(4)], [3.0] * 50), [2])
    assert found is not None
    assert found.low <= 0 <= found.high


def test_without_other_ranks_or_enough_steps_there_is_no_gain() -> None:
    two = window([[1.0] * 50, [2.0] * 50], [3.0] * 50)
    assert gain(two, [0, 1]) is None
    assert gain(two, []) is None
    assert gain(window([[1.0] * 19, [2.0] * 19], [3.0] * 19), [1]) is None
