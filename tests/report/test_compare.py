"""Differences between runs: found with the right size if there is one, and not found otherwise."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from distdiag.report.compare import Comparison, Outcome, compare_runs, difference
from distdiag.store.reader import open_run
from tests.report.runs import DEADLOCK, STRAGGLER, make_run


@contextmanager
def compared(*paths: Path, skip: int | None = None) -> Iterator[Comparison]:
    with ExitStack() as stack:
        yield compare_runs([stack.enter_context(open_run(p)) for p in paths], skip)


def noise(n: int, mean: float, seed: int, relative: float = 0.05, correlation: float = 0.0) -> np.ndarray:
    """Return step times around `mean`, each with `correlation` of its neighbour's excess."""
    rng = np.random.default_rng(seed)
    e = rng.normal(0, relative * mean, n)
    for i in range(1, n):
        e[i] = correlation * e[i - 1] + np.sqrt(1 - correlation**2) * e[i]
    return mean + e


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.10, Outcome.SLOWER), (0.90, Outcome.FASTER), (1.005, Outcome.SAME), (1.0, Outcome.SAME)]
)
def test_a_difference_is_found_with_its_size(factor: float, outcome: Outcome) -> None:
    d = difference(noise(400, 100, 1), noise(400, 100 * factor, 2))
    assert d.outcome == outcome
    assert d.change_pct is not None and d.ci95_pct is not None
    assert d.change_pct == pytest.approx(100 * (factor - 1), abs=1.5)
    assert d.ci95_pct[0] <= d.change_pct <= d.ci95_pct[1]


def test_the_interval_covers_the_truth_although_steps_are_correlated() -> None:
    # intervals that assume independent neighbours cover it in about half of these
    covered = 0
    for seed in range(60):
        d = difference(noise(300, 100, seed, correlation=0.8), noise(300, 100, 1000 + seed, correlation=0.8))
        assert d.ci95_pct is not None
        covered += d.ci95_pct[0] <= 0 <= d.ci95_pct[1]
    assert covered >= 50


def test_too_few_steps_are_reported() -> None:
    assert difference(noise(19, 100, 1), noise(400, 100, 2)).outcome == Outcome.UNKNOWN


def test_an_interval_that_holds_zero_and_what_matters_decides_nothing() -> None:
    rng = np.random.default_rng(5)
    before, after = (np.repeat(rng.normal(mean, 25, 6), 5) for mean in (100, 115))  # steps in spells
    d = difference(before, after)
    assert d.ci95_pct and d.ci95_pct[0] < 0 < d.change_pct < d.ci95_pct[1]  # type: ignore[operator]
    assert d.outcome == Outcome.UNDECIDED
    wide, limit = difference(noise(30, 100, 1, 0.2), noise(30, 100, 2, 0.2)), 0.5
    assert wide.ci95_pct and wide.ci95_pct[0] < 0 < limit < wide.ci95_pct[1]
    assert difference(noise(30, 100, 1, 0.2), noise(30, 100, 2, 0.2), limit).outcome == Outcome.UNDECIDED
    assert difference(noise(400, 100, 1), noise(400, 100, 2), 20.0).outcome == Outcome.SAME


def test_other_scripts_and_busy_hosts_are_noted(tmp_path: Path) -> None:
    with compared(make_run(tmp_path / "a"), make_run(tmp_path / "b", name="llama")) as c:
        assert c.notes == ("the runs have different scripts: cifar, llama",)
    busy = make_run(tmp_path / "c")
    with sqlite3.connect(busy / "run.db") as db:
        db.execute("DELETE FROM host")
        db.execute("INSERT INTO host (t_s, node, host, cpu_pct, cores) VALUES (1, 0, 'n', 95, 64)")
        db.execute(
            "INSERT INTO process (t_s, rank, cpu_pct, children_cpu_pct) VALUES (1, 0, 100, NULL), (1, 1, 100, 200)"
        )
    db.close()
    with compared(make_run(tmp_path / "d"), busy) as c:
        assert c.runs[1].host_cpu_pct == 95 and c.runs[1].foreign_cpus == pytest.approx(0.95 * 64 - 4)
        assert [n for n in c.notes if "in use during c" in n]


def test_runs_are_listed_next_to_each_other(tmp_path: Path) -> None:
    slow = make_run(tmp_path / "slow", slow_rank=2, slow_ms=30.0, findings=(STRAGGLER,), torch="2.12.0")
    with compared(make_run(tmp_path / "good", seed=1), slow, make_run(tmp_path / "again", seed=3)) as c:
        good, worse, again = c.runs
    assert good.against_baseline is None and good.findings == {}
    assert worse.against_baseline and worse.against_baseline.outcome == Outcome.SLOWER
    assert worse.against_baseline.change_pct == pytest.approx(30, abs=2)
    assert again.against_baseline and again.against_baseline.outcome == Outcome.SAME
    # medians over all ranks: three of four wait in backward for the rank that is late with its data
    assert worse.phases_change_ms["backward"] == pytest.approx(30, abs=2)
    assert worse.phases_ms["h2d"] is None and worse.phases_change_ms["h2d"] is None
    assert worse.findings == {"straggler/data": "rank 2 (cleared)"}
    assert any("versions of torch" in n for n in c.notes)


def test_warm_up_is_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", steps=60, first_step_ms=60_000.0)
    with compared(path, path) as c:
        assert c.runs[0].skipped_steps == 10
        assert c.runs[0].step and c.runs[0].step.max_ms is not None and c.runs[0].step.max_ms < 200
    with compared(path, path, skip=0) as c:
        assert c.runs[0].step and c.runs[0].step.max_ms == pytest.approx(60_000)


def test_a_run_without_steps_is_compared_with_one_that_has_steps(tmp_path: Path) -> None:
    with compared(make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=0, findings=(DEADLOCK,))) as c:
        empty = c.runs[1]
    assert empty.step is None and empty.against_baseline and empty.against_baseline.outcome == Outcome.UNKNOWN
    assert empty.findings == {"deadlock/missing_rank": "rank 1"}
