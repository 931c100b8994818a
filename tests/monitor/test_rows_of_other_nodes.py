"""run.db of node 0 has the steps of all ranks, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from distdiag.diagnosis.model.snapshot import Step
from distdiag.monitor.recording import Recording
from distdiag.monitor.rows import Steps
from distdiag.store.rows import StepRow
from tests.diagnosis.made import job, rank


class Kept:
    """A writer that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, rows: list[Any]) -> None:
        self.rows += rows


def test_of_thousands_of_rows_a_second_every_few_steps_and_the_long_ones_are_written() -> None:
    def step(i: int) -> Step:
        return Step(i, float(i), 500.0 if i == 5 else 100.0, *[1.0] * 6, ready_s=None, batch=0, samples=8, loss=None)

    for world, expected in ((400, [1, 2, 3, 4, 5, 6, 7, 8]), (900, [3, 5, 6])):  # 4,000 and 9,000 rows a second
        rows = Steps()
        for q in range(world):
            rows.add(q, [step(i) for i in range(1, 9)])
        s = msgspec.structs.replace(job(rank(0)), usual_step_s=0.1)
        found = rows.rows(world, 9.0, s)
        assert sorted({r.step for r in found}) == expected and len(found) == world * len(expected)
        assert rows.rows(world, 20.0, s) == []


def test_each_step_of_a_rank_elsewhere_is_written_once(tmp_path: Path) -> None:
    def steps(first: int, last: int) -> tuple[Step, ...]:
        return tuple(
            Step(i, float(i), 100.0, *[1.0] * 6, ready_s=None, batch=0, samples=8, loss=None)
            for i in range(first, last + 1)
        )

    kept = Kept()
    recording = Recording(tmp_path, 0, kept, {})  # type: ignore[arg-type]
    for first, last, t_s in ((1, 3, 3.0), (1, 3, 3.5), (2, 5, 5.0), (6, 6, 6.0)):
        s = msgspec.structs.replace(job(rank(0, steps=steps(first, last)), rank(1, steps=steps(first, last))), t_s=t_s)
        recording.write_calls_and_steps(s, over=False)
    found = sorted((r.step, r.rank) for r in kept.rows if isinstance(r, StepRow))
    assert found == [(step, q) for step in range(1, 7) for q in (0, 1)]
