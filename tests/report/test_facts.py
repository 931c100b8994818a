"""The facts in a report, for runs whose true values are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distdiag.report import steps as step_tables
from distdiag.report.steps import Steps, job_steps, quantiles, read_steps, samples_per_s, series, slowest_share
from distdiag.store.reader import open_run
from distdiag.store.rows import StepRow
from distdiag.store.writer import Writer
from tests.report.runs import DEADLOCK, STRAGGLER, facts_of, make_run


def test_the_slow_rank_is_the_one_that_waits_least(tmp_path: Path) -> None:
    f = facts_of(make_run(tmp_path / "r", slow_rank=2, slow_ms=30.0))
    assert [r.slowest_share for r in f.ranks] == [0.0, 0.0, 1.0, 0.0]
    slow, other = f.ranks[2], f.ranks[0]
    assert slow.wait_ms and other.wait_ms and slow.wait_ms < other.wait_ms
    assert slow.data_ms and other.data_ms and slow.data_ms - other.data_ms == pytest.approx(30.0, rel=0.01)
    assert slow.step_ms == other.step_ms
    assert f.collectives[0].late_rank == 2 and f.collectives[0].late_share == 1.0


def test_facts_of_the_job_are_computed(tmp_path: Path) -> None:
    f = facts_of(make_run(tmp_path / "r", ranks=4, steps=200, step_ms=100.0, samples=32))
    assert f.step and f.step.n == 200
    assert f.step.ci95_ms and f.step.ci95_ms[0] <= f.step.p50_ms <= f.step.ci95_ms[1]
    assert f.step.p50_ms == pytest.approx(100, rel=0.01)
    assert f.samples_per_s == pytest.approx(4 * 32 / 0.1, rel=0.01)
    assert (f.first_step, f.last_step, f.sampled_every) == (1, 200, 1)
    assert f.versions == {"distdiag": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
    assert f.details == {"model": "SimpleCNN"}, "what readers show elsewhere is not repeated"
    assert f.ranks[0].h2d_ms is None, "not measured is not zero"
    assert f.hosts[0].memory_peak_bytes == 3 * 2**30 and f.hosts[0].net_sent_bytes_per_s is None
    collective = f.collectives[0]
    assert collective.count == 400 and collective.p50_us == 1000
    # S/t = 2^20 B / 1 ms; 2(n-1)/n = 1.5 for four ranks
    assert collective.algbw_gbps == pytest.approx(2**20 / 1e-3 / 1e9)
    assert collective.busbw_gbps == pytest.approx(1.5 * 2**20 / 1e-3 / 1e9)


def test_gpu_facts_cover_the_run(tmp_path: Path) -> None:
    g = facts_of(make_run(tmp_path / "r", ranks=2, gpus=True)).gpus
    assert len(g) == 2
    assert g[0].temperature_max_c == 62 and g[0].throttled_share == pytest.approx(1 / 3)
    assert g[0].throttle == "SW thermal" and g[0].pcie == "gen 4 of 5, x8 of x16"


def test_findings_are_split_into_open_and_cleared(tmp_path: Path) -> None:
    f = facts_of(make_run(tmp_path / "r", findings=(STRAGGLER, DEADLOCK)))
    assert f.open_findings == (DEADLOCK,) and f.cleared_findings == (STRAGGLER,)


def test_a_run_without_rows_has_empty_facts(tmp_path: Path) -> None:
    Writer(tmp_path / "r").close()
    f = facts_of(tmp_path / "r")
    assert f.step is None and f.series == () and f.ranks == () and f.samples_per_s is None and f.collectives == ()


def test_long_runs_are_sampled_by_whole_steps(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", ranks=4, steps=300)
    with open_run(path) as run:
        steps = read_steps(run, max_rows=400)
        assert steps.every == 3 and set(steps.step % 3) == {0}
        assert len(steps) == 400
        assert samples_per_s(job_steps(steps)) == pytest.approx(samples_per_s(job_steps(read_steps(run))), rel=0.01)


def test_a_step_that_is_not_complete_on_all_ranks_does_not_count(tmp_path: Path) -> None:
    with Writer(tmp_path / "r") as w:
        w.add([StepRow(rank=r, step=s, t_end_s=float(s), step_ms=10.0) for s in (1, 2) for r in (0, 1)])
        w.add([StepRow(rank=0, step=3, t_end_s=3.0, step_ms=1.0)])
    with open_run(tmp_path / "r") as run:
        assert job_steps(read_steps(run)).step.tolist() == [1, 2]


def rows(**columns: list[float]) -> Steps:
    n = len(next(iter(columns.values())))
    return Steps({c: np.array(columns.get(c, [np.nan] * n), dtype=float) for c in step_tables.COLUMNS}, 1)


def test_steps_without_measurements_are_left_out() -> None:
    nan = float("nan")
    job = job_steps(rows(rank=[0, 1, 0, 1], step=[1, 1, 2, 2], step_ms=[5, nan, nan, nan], t_end_s=[1, 2, 3, 4]))
    assert job.step.tolist() == [1] and job["step_ms"].tolist() == [5]
    assert slowest_share(rows(rank=[0, 0], step=[1, 2], self_ms=[4, 5])) == {}, "one rank alone is not the slowest"


def test_the_first_of_two_equally_slow_ranks_counts_once() -> None:
    share = slowest_share(rows(rank=[0, 1, 0, 1], step=[1, 1, 2, 2], self_ms=[7, 7, 7, 8]))
    assert share == {0: 0.5, 1: 0.5}


def test_quantiles_are_left_out_where_the_sample_is_small() -> None:
    assert quantiles(np.array([])) is None
    few = quantiles(np.arange(10.0))
    assert few and few.ci95_ms is None and few.p95_ms is None and few.max_ms == 9
    enough = quantiles(np.arange(100.0))
    assert enough and enough.ci95_ms is not None and enough.p95_ms is not None


def test_a_long_series_is_folded_and_keeps_its_extremes(tmp_path: Path) -> None:
    with open_run(make_run(tmp_path / "r", ranks=1, steps=1000, first_step_ms=5000.0)) as run:
        points = series(job_steps(read_steps(run)), points=50)
    assert len(points) == 50
    assert points[0].high_ms == 5000 and points[0].step_ms < 200
    assert [p.step_end for p in points[:-1]] == [p.step for p in points[1:]]


def test_a_rank_count_that_is_text_is_not_measured() -> None:
    from distdiag.report import facts

    found = facts._collective(("g", "all_reduce", "float32", 4, "many"), [(10.0, 0.0, None)])
    assert (found.ranks, found.busbw_gbps) == (None, None)
