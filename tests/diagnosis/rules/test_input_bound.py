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


def test_the_line_of_the_dataset_is_named_where_the_rank_runs_it_itself() -> None:
    read, loop = Site("/job/text.py", 27, "from_file"), Site("/job/train.py", 31, "main")
    stacks = {"phase_stacks": {"data": (read, Site("/job/train.py", 12, "collate"), loop)}}

    def found(workers: int) -> Finding:
        ranks = [
            rank(q, steps=steps(60.0, "data", seed=q), loaders=(loader(workers=workers, site=loop),), **stacks)
            for q in range(2)
        ]
        return only(of_kind(speeds(job(*ranks)), "input_bound"))

    f = found(0)
    assert f.message.endswith(
        "at train.py:31 in main; most of it at train.py:12 in collate, at text.py:27 in from_file"
    )
    assert "once, in `__init__`" in f.advice
    assert "most of it" not in found(2).message and "(now 2)" in found(2).advice


def test_data_in_time_or_late_on_one_rank_only_is_not_input_bound() -> None:
    assert input_bound(steps(), steps(seed=1)) == []
    assert (
        input_bound(steps(wait_ms=60.0), steps(60.0, "data", seed=1)) == []
    )  # a straggler: the other rank has its data
    assert input_bound(steps(60.0, "data", n=20), steps(60.0, "data", n=20)) == []  # too few steps to tell
    assert input_bound(steps(60.0, "data"), ()) == []  # one rank's steps are not known
    assert input_bound(steps(60.0, "data"), steps(60.0, "data"), world_size=3) == []
