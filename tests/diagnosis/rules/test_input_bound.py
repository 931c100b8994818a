"""input_bound: all ranks wait for data."""

from __future__ import annotations

from typing import Any

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    Loader,
    Site,
    Step,
)
from tests.diagnosis.made import job, loader, of_kind, only, rank, speeds, steps


def input_bound(*of_ranks: tuple[Step, ...], **more: Any) -> list[Finding]:
    ranks = [rank(q, steps=x, loaders=(feeding(),)) for q, x in enumerate(of_ranks)]
    return of_kind(speeds(job(*ranks, **more)), "input_bound")


def feeding() -> Loader:
    return loader(workers=2, site=Site("/job/train.py", 31, "main"))


def test_a_job_in_which_all_ranks_wait_for_data_is_input_bound() -> None:
    f = only(input_bound(steps(60.0, "data"), steps(60.0, "data", seed=1)))
    assert (f.kind, f.cause, f.severity, f.certainty) == ("input_bound", None, "info", "proved")
    assert (f.culprits, f.victims) == ((), (0, 1))
    assert {(w.rank, w.line) for w in f.where} == {(0, 31), (1, 31)}
    assert "48 %" in f.cost and "(now 2)" in f.advice


def test_data_in_time_or_late_on_one_rank_only_is_not_input_bound() -> None:
    assert input_bound(steps(), steps(seed=1)) == []
    assert (
        input_bound(steps(wait_ms=60.0), steps(60.0, "data", seed=1)) == []
    )  # a straggler: the other rank has its data
    assert input_bound(steps(60.0, "data", n=20), steps(60.0, "data", n=20)) == []  # too few steps to tell
    assert input_bound(steps(60.0, "data"), ()) == []  # one rank's steps are not known
    assert input_bound(steps(60.0, "data"), steps(60.0, "data"), world_size=3) == []
