"""Intervals have their coverage, modes are found, fits and tests recover what was simulated."""

from __future__ import annotations

import numpy as np
import pytest

from distdiag.terms import statistics as st


def autocorrelated(rng: np.random.Generator, n: int, phi: float) -> np.ndarray:
    """Return AR(1) samples with mean 100 and standard deviation 10."""
    out = np.empty(n)
    value = rng.normal(0, 10)
    for i in range(n):
        value = phi * value + rng.normal(0, 10 * (1 - phi**2) ** 0.5)
        out[i] = 100 + value
    return out


def coverage(rng: np.random.Generator, phi: float, shuffled: bool) -> float:
    """Return the share of 95 % intervals that contain the true median, 100; `shuffled` removes the order, as an i.i.d. bootstrap does."""
    hits = 0
    for trial in range(120):
        x = autocorrelated(rng, 400, phi)
        interval = st.interval_of_median(rng.permutation(x) if shuffled else x, replicates=150, seed=trial)
        hits += interval.low <= 100 <= interval.high
    return hits / 120


def test_the_block_bootstrap_has_its_coverage_on_autocorrelated_samples():
    rng = np.random.default_rng(1)

    by_blocks = coverage(rng, 0.85, shuffled=False)
    as_if_independent = coverage(rng, 0.85, shuffled=True)

    assert by_blocks > 0.82
    assert as_if_independent < by_blocks - 0.3


def test_independent_samples_get_short_blocks():
    rng = np.random.default_rng(2)
    assert st.correlation_length(rng.normal(size=1000)) <= 12
    assert st.correlation_length(autocorrelated(rng, 1000, 0.9)) > 20


def test_one_huge_outlier_does_not_move_the_interval():
    rng = np.random.default_rng(3)
    x = rng.normal(100, 1, 200)
    x[50] = 1e6
    interval = st.interval_of_median(x)
    assert 99 < interval.low < interval.high < 101


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        st.interval_of_median(np.array([]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", ["normal", "lognormal", "exponential", "gamma"])
def test_a_unimodal_sample_has_no_modes(shape: str, seed: int):
    rng = np.random.default_rng(seed)
    samples = {
        "normal": rng.normal(300, 30, 500),
        "lognormal": rng.lognormal(5, 0.8, 500),
        "exponential": 100 + rng.exponential(100, 500),
        "gamma": rng.gamma(2, 100, 500),
    }[shape]
    assert st.find_modes(samples) == []


@pytest.mark.parametrize("share", [0.08, 0.3, 0.5])
def test_two_modes_are_found_with_their_shares(share: float):
    rng = np.random.default_rng(4)
    slow = rng.random(1000) < share
    samples = np.where(slow, rng.normal(4300, 200, 1000), rng.normal(300, 30, 1000))

    modes = st.find_modes(samples)

    assert len(modes) == 2
    assert modes[0]["time_us"] == pytest.approx(300, rel=0.05)
    assert modes[1]["time_us"] == pytest.approx(4300, rel=0.05)
    assert modes[1]["share"] == pytest.approx(share, abs=0.04)


def test_the_fit_finds_latency_and_bandwidth():
    rng = np.random.default_rng(5)
    sizes = [1024 * 4**k for k in range(9)]
    medians = [(200 + s / 1500) * rng.normal(1, 0.02, 100) for s in sizes]  # 1,500 bytes/us = 1.5 GB/s

    fit = st.fit_latency_bandwidth(sizes, medians)

    assert fit is not None
    assert fit.latency_us == pytest.approx(200, rel=0.02)
    assert fit.bandwidth_gbps == pytest.approx(1.5, rel=0.02)
    assert fit.half_bandwidth_bytes == pytest.approx(300_000, rel=0.03)
    assert fit.latency_ci95[0] < 200 < fit.latency_ci95[1]
    assert fit.bandwidth_ci95[0] < 1.5 < fit.bandwidth_ci95[1]
    assert fit.worst_error < 0.05


def test_two_sizes_are_not_fitted():
    assert st.fit_latency_bandwidth([4, 8], [np.ones(10), np.ones(10)]) is None


def test_latency_is_never_negative():
    sizes = [1000, 2000, 4000]
    fit = st.fit_latency_bandwidth(sizes, [np.full(5, s**1.2) for s in map(float, sizes)])
    assert fit is not None and fit.latency_us == 0


def test_a_difference_is_distinguished_from_none():
    rng = np.random.default_rng(6)
    before = rng.normal(100, 5, 30)

    same = st.compare(before, rng.normal(100, 5, 30))
    slower = st.compare(before, rng.normal(120, 5, 30))

    assert same.p_value > 0.05 and abs(same.cliffs_delta) < 0.4
    assert slower.p_value < 1e-6 and slower.cliffs_delta > 0.9
    assert slower.ratio == pytest.approx(1.2, rel=0.03)


def test_ties_are_neither_larger_nor_smaller():
    equal = st.compare(np.ones(10), np.ones(10))
    assert equal.cliffs_delta == 0 and equal.p_value == 1


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    # Newcombe 1998, table 1: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_share_is_wilsons(count: int, n: int, low: float, high: float) -> None:
    found = st.interval_of_share(count, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4)


def test_a_change_is_found_at_its_place() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(40, 1, 15), rng.normal(20, 1, 9)])
    change = st.find_change(values)
    assert change is not None and change.index == 15 and change.p_value < 0.01
    assert change.ratio.low < 0.5 < change.ratio.high and change.ratio.high - change.ratio.low < 0.1


def test_noise_is_rarely_a_change() -> None:
    rng = np.random.default_rng(2)
    found = [st.find_change(rng.lognormal(0, 0.2, 20)) for _ in range(200)]
    assert sum(c is not None and c.p_value < 0.05 for c in found) <= 18  # 10 expected; P(19 or more) = 0.4 %
    assert st.find_change(np.ones(6)) is None
    level = st.find_change(np.ones(20))
    assert level is not None and level.ratio.low == level.ratio.high == 1
