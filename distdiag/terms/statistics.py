"""Statistics of samples: block bootstrap, modes, latency + bandwidth fit, two-sample comparison.

Samples of one loop are autocorrelated: a slow one is followed by slow ones. A bootstrap of single samples then gives
intervals up to 2.7 times too narrow, so blocks of neighbours are drawn (Kunsch 1989). With a few hundred samples
correlated as on a busy host (0.85 from one to the next), such an interval contains the true median in 89 of 100 cases
instead of 95; an interval from single samples, in 45.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]

CONFIDENCE = 0.95
_MOST_SAMPLES = 2_000  # per size for a bootstrap; more cost time and add nothing


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval, in the unit of its samples."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LatencyBandwidth:
    """t(S) = latency + S / bandwidth, with 95 % intervals."""

    latency_us: float
    bandwidth_gbps: float  # algorithm bandwidth of very large messages, GB/s
    half_bandwidth_bytes: float  # S that reaches half of it: latency x bandwidth
    latency_ci95: tuple[float, float]
    bandwidth_ci95: tuple[float, float]
    worst_error: float  # largest |fit / measured - 1| over the sizes


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of two sets of times, the second against the first."""

    ratio: float  # median of the second / median of the first; above 1 is slower
    p_value: float  # two-sided Mann-Whitney U
    cliffs_delta: float  # P(second > first) - P(second < first), -1 to 1


def correlation_length(samples: Samples) -> int:
    """Return the length of a bootstrap block: 3 x the integrated autocorrelation time, from n^(1/3) to n/4."""
    n = len(samples)
    least = max(1, round(n ** (1 / 3)))
    if n < 16:
        return least
    # On ranks, not values: one 40 ms outlier must not hide that its neighbours are correlated.
    ranks = np.argsort(np.argsort(samples)).astype(np.float64)
    ranks -= ranks.mean()
    variance = float(ranks @ ranks)
    tau = 1.0
    for lag in range(1, min(n // 4, 200)):
        rho = float(ranks[:-lag] @ ranks[lag:]) / variance
        if rho < 0.05:
            break
        tau += 2 * rho
    return int(min(max(least, math.ceil(3 * tau)), max(1, n // 4)))


def bootstrap_medians(samples: Samples, replicates: int = 300, seed: int = 0) -> Samples:
    """Return the medians of `replicates` resamples of blocks of neighbouring samples (circular block bootstrap).

    Raises:
        ValueError: no samples.
    """
    n = len(samples)
    if n == 0:
        raise ValueError("no samples")
    if n > _MOST_SAMPLES:
        samples, n = samples[:: math.ceil(n / _MOST_SAMPLES)], len(samples[:: math.ceil(n / _MOST_SAMPLES)])
    length = correlation_length(samples)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, n, size=(replicates, math.ceil(n / length)))
    index = (starts[:, :, None] + np.arange(length)).reshape(replicates, -1)[:, :n] % n
    return np.median(samples[index], axis=1)


def interval_of_median(samples: Samples, replicates: int = 300, seed: int = 0) -> Interval:
    """Return the 95 % interval of the median by block bootstrap, in the samples' unit."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(bootstrap_medians(samples, replicates, seed), [tail, 100 - tail])
    return Interval(float(low), float(high))


# 97.5 % quantiles of Student's t with 1, 2, … degrees of freedom
_STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def interval_of_rounds(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of the geometric mean of independent rounds: Student's t on their logarithms.

    Raises:
        ValueError: fewer than two rounds.
    """
    if len(values) < 2:
        raise ValueError("an interval needs two rounds or more")
    logs = np.log(np.asarray(values, dtype=np.float64))
    t = _STUDENT_T[min(len(values) - 1, len(_STUDENT_T)) - 1]
    half = t * float(logs.std(ddof=1)) / math.sqrt(len(values))
    centre = float(logs.mean())
    return Interval(math.exp(centre - half), math.exp(centre + half))


def find_modes(samples: Samples) -> list[dict[str, float]]:
    """Return the two modes of a bimodal distribution of times, µs: their median and share of all; [] if there is one mode.

    The threshold is Otsu's, on logarithms. Two modes need at least 5 % of the samples each, medians that differ by half
    or more, and a nearly empty middle third between them: a long tail is not a mode.
    """
    n = len(samples)
    if n < 40:
        return []
    logs = np.log(np.sort(samples[samples > 0]))
    n = len(logs)
    count = np.arange(1, n)
    left_mean = np.cumsum(logs)[:-1] / count
    right_mean = (logs.sum() - np.cumsum(logs)[:-1]) / (n - count)
    between = count * (n - count) * (left_mean - right_mean) ** 2
    least = max(2, math.ceil(0.05 * n))
    cut = int(np.argmax(between[least - 1 : n - least])) + least
    left, right = logs[:cut], logs[cut:]
    a, b = float(np.median(left)), float(np.median(right))
    if b - a < math.log(1.5):
        return []
    third = (b - a) / 3
    in_valley = int(((logs > a + third) & (logs < b - third)).sum())
    if in_valley > 0.12 * min(len(left), len(right)):
        return []
    return [{"time_us": math.exp(at), "share": len(of) / n} for at, of in ((a, left), (b, right))]


def fit_latency_bandwidth(sizes_bytes: list[int], medians_us: list[Samples]) -> LatencyBandwidth | None:
    """Fit t(S) = L + S/B to median times by least squares of the relative error.

    Args:
        sizes_bytes: One per size, at least three different ones.
        medians_us: Per size, bootstrap replicates of the median time in microseconds; their median is the value.

    Returns:
        None if fewer than three sizes were measured, or time does not grow with size.
    """
    if len(set(sizes_bytes)) < 3:
        return None
    s = np.asarray(sizes_bytes, dtype=np.float64)
    centre = np.array([np.median(m) for m in medians_us])
    best = _solve(s, centre)
    if best is None:
        return None
    latency, per_byte = best
    replicates = min(len(m) for m in medians_us)
    again = [r for i in range(replicates) if (r := _solve(s, np.array([m[i] for m in medians_us]))) is not None]
    latencies = np.percentile([r[0] for r in again], [2.5, 97.5]) if again else [latency, latency]
    rates = np.percentile([1 / r[1] / 1e3 for r in again], [2.5, 97.5]) if again else [1 / per_byte / 1e3] * 2
    fitted = latency + s * per_byte
    return LatencyBandwidth(
        latency_us=latency,
        bandwidth_gbps=1 / per_byte / 1e3,  # bytes/us = MB/s; / 1e3 = GB/s
        half_bandwidth_bytes=latency / per_byte,
        latency_ci95=(float(latencies[0]), float(latencies[1])),
        bandwidth_ci95=(float(rates[0]), float(rates[1])),
        worst_error=float(np.max(np.abs(fitted / centre - 1))),
    )


def _solve(sizes: Samples, times: Samples) -> tuple[float, float] | None:
    """Return (latency us, us per byte) with the least sum of squared relative errors; latency not below 0."""
    design = np.stack([1 / times, sizes / times], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(design, np.ones(len(times)), rcond=None)
    if latency < 0:
        latency = 0.0
        x = sizes / times
        per_byte = float(x.sum() / (x @ x))
    return (float(latency), float(per_byte)) if per_byte > 0 else None


def compare(before: Samples, after: Samples) -> Comparison:
    """Return the Mann-Whitney p-value and Cliff's delta of `after` against `before`.

    The values must be independent (medians of separate blocks). Single iterations are not: they make any difference
    "significant".
    """
    n, m = len(before), len(after)
    both = np.concatenate([before, after])
    order = np.argsort(both, kind="stable")
    _, counts = np.unique(both, return_counts=True)
    ranks = np.empty(n + m)
    ends = np.cumsum(counts)
    ranks[order] = np.repeat(ends - (counts - 1) / 2, counts)  # ties share their mean rank
    u = float(ranks[n:].sum() - m * (m + 1) / 2)  # pairs in which `after` is larger, ties half
    delta = 2 * u / (n * m) - 1
    total = n + m
    ties = float((counts**3 - counts).sum()) / (total * (total - 1)) if total > 1 else 0.0
    variance = n * m / 12 * (total + 1 - ties)
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance) if variance > 0 else 0.0
    return Comparison(
        ratio=float(np.median(after) / np.median(before)), p_value=math.erfc(z / math.sqrt(2)), cliffs_delta=delta
    )


def interval_of_share(count: int, n: int) -> Interval:
    """Return the 95 % interval of a share of `n` independent cases (Wilson 1927), also for small `n`.

    Raises:
        ValueError: no cases.
    """
    if n <= 0:
        raise ValueError("no cases")
    z2 = 1.959964**2
    centre, half = (count + z2 / 2) / (n + z2), math.sqrt(count * (n - count) / n + z2 / 4) * math.sqrt(z2) / (n + z2)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


@dataclass(frozen=True, slots=True)
class Change:
    """A lasting change of a series: its values from `index` on differ from those before."""

    index: int
    before: float  # median
    after: float
    ratio: Interval  # after / before, 95 %
    p_value: float  # of the place, by permutation


FEWEST_EACH_SIDE = 3
_PERMUTATIONS = 1999


def find_change(values: Samples) -> Change | None:
    """Return where a series of independent positive values most likely changed its level; None if too short.

    The statistic is the largest CUSUM of ranks, scaled by its deviation at each place; its p-value is the
    share of permutations that reach it. The interval is a bootstrap of the ratio of medians on both sides of
    that place.
    """
    n, each = len(values), FEWEST_EACH_SIDE
    if n < 2 * each + 1:
        return None
    rng = np.random.default_rng(0)
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts + 1) / 2)[at] - (n - 1) / 2  # ties share their mean rank
    k = np.arange(1, n)
    scale = np.sqrt(k * (n - k))
    inside = slice(each - 1, n - each)

    def largest(rows: Samples) -> tuple[Samples, NDArray[np.int64]]:
        sums = np.abs(np.cumsum(rows, axis=1)[:, :-1]) / scale
        return sums[:, inside].max(axis=1), sums[:, inside].argmax(axis=1) + each

    found, where = largest(ranks[None, :])
    others, _ = largest(rng.permuted(np.tile(ranks, (_PERMUTATIONS, 1)), axis=1))
    p_value = (1 + int((others >= found[0] - 1e-9).sum())) / (_PERMUTATIONS + 1)
    before, after = values[: where[0]], values[where[0] :]
    medians = [np.median(rng.choice(side, (1000, len(side))), axis=1) for side in (before, after)]
    low, high = np.percentile(medians[1] / medians[0], [2.5, 97.5])
    interval = Interval(float(low), float(high))
    return Change(int(where[0]), float(np.median(before)), float(np.median(after)), interval, p_value)
