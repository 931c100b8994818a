"""The row of a rank in run.db, from its newest steps."""

from __future__ import annotations

import pytest

from distdiag.diagnosis.model.snapshot import Step
from distdiag.monitor.rows import rank_rows
from tests.diagnosis.made import job, rank


def test_throughput_leaves_out_the_slow_first_step() -> None:
    def steps(n: int) -> tuple[Step, ...]:
        return tuple(
            Step(i, float(i), 9000.0 if i == 1 else 100.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, None, 0, 8, None)
            for i in range(1, n + 1)
        )

    shown = [rank_rows(job(rank(0, steps=steps(n))), {}, [])[0].samples_per_s for n in (11, 1)]
    assert shown == pytest.approx([80.0, 8 / 9.0])
