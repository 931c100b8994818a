"""Hand-made rows, results and time stamps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distdiag.probekit.measure.noise import BlockNoise
from distdiag.probekit.measure.sampling import Stamped
from distdiag.probekit.verdict.result import HostNoise, Result, Row, TimeUs


@pytest.fixture
def make_row():
    def make(size: int = 2**20, p50: float = 1000.0, **changes: Any) -> Row:
        busbw = size / p50 / 1e3
        fields: dict[str, Any] = {
            "bytes": size, "elements": size // 4, "iterations": 100,
            "time_us": TimeUs(p50 * 0.9, p50, p50 * 1.2, p50 * 2, (p50 * 0.98, p50 * 1.02)),
            "wire_us": p50 * 0.9, "algbw_gbps": busbw, "busbw_gbps": busbw, "busbw_ci95_gbps": (busbw / 1.02, busbw / 0.98),
            "skew_us": 20.0, "late_rank": None, "late_share": 0.5, "correct": True,
        }  # fmt: skip
        return Row(**(fields | changes))

    return make


@pytest.fixture
def make_result():
    def make(rows: list[Any], noisy: bool = False, **changes: Any) -> Result:
        result = Result("allreduce", 2, "gloo", "cpu", "float32", rows=rows)
        result.host_noise = HostNoise(1.4 if noisy else 0.0, 2, 10, 8 if noisy else 0, noisy)
        result.ceilings = {"memcpy_gbps": 20.0, "tcp_both_ways_gbps": 1.8}
        result.versions = {"torch": "2.13.0"}
        result.details = {"host_class": "x86_64 test x2"}
        result.hosts = ["here"]
        for key, value in changes.items():
            setattr(result, key, value)
        return result

    return make


@pytest.fixture
def make_stamps():
    """Return the stamps of two ranks: rank 1 arrives `late_us` after rank 0, the transfer takes `wire_us`."""

    def make(n: int, late_us: float, wire_us: float, noise: list[BlockNoise] | None = None) -> Stamped:
        rng = np.random.default_rng(0)
        start = np.arange(n) * 20_000.0
        entered = np.stack([start, start + late_us + rng.normal(0, 1, n)])
        left = entered.max(axis=0) + wire_us + rng.normal(0, 3, (2, n))
        blocks = noise or [BlockNoise(0.0, 2, 2)] * 4
        return Stamped(entered, left, np.arange(n) * len(blocks) // n, blocks)

    return make
