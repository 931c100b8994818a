"""input_bound: all ranks wait for data."""

from __future__ import annotations

from typing import Any

import pytest

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    Loader,
    Site,
    Step,
)
from distdiag.diagnosis.rules import input_bound as rule
from tests.diagnosis.made import findings, job, loader, of_kind, only, rank, speeds, steps, stragglers


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


@pytest.mark.parametrize(
    ("kept", "length", "period", "advice"),
    [
        (False, 20, 20, "set `persistent_workers=True`"), (True, 20, 20, "the data several times"),
        (True, None, 20, "`__iter__` again"), (None, 20, 20, "raise num_workers"), (False, 20, 7, "raise num_workers"),
        (True, None, 7, "raise num_workers"),
    ],
)  # fmt: skip
def test_waits_at_the_start_of_epochs_are_named_with_what_the_workers_do(
    kept: bool | None, length: int | None, period: int, advice: str
) -> None:
    """Step 60 has ended, the last of the third epoch; the next one's first batch may be in use."""

    def of_rank(q: int) -> tuple[Step, ...]:
        late = steps(2000.0, "data", seed=q)
        return tuple(b if b.step % period == 1 else a for a, b in zip(steps(seed=q), late, strict=True))

    for given in (20, 1):
        feeds = loader(
            workers=3, length=length, dataset_length=length, batches=given, previous_batches=20, iterations_started=3,
            persistent_workers=kept,
        )  # fmt: skip
        seen = ((Site("/job/shards.py", 19, "fill"), 3), (Site("/job/shards.py", 30, "draw"), 1))
        ranks = [rank(q, step=60, steps=of_rank(q), loaders=(feeds,), worker_sites=seen) for q in range(2)]
        f = only(of_kind(speeds(job(*ranks)), "input_bound"))
        told = advice != "raise num_workers"
        assert f.advice.startswith("set `pers") is ("`persistent" in advice)
        assert advice in f.advice and ("raise num_workers" in f.advice) is not told
        assert ("an epoch that the main process sets in it no longer reaches them" in f.advice) is (
            "`persistent" in advice
        )
        assert ("get_worker_info" in f.advice) is (length is None and not told)
        assert ("for the first batch of an epoch of 20 batches, 2.0 s each time" in f.message) is told
        assert f.message.endswith("; its worker is then at shards.py:19 in fill")


def test_ranks_that_wait_for_one_lock_want_no_workers() -> None:
    read, loop = Site("/job/store.py", 2, "read"), Site("/job/train.py", 31, "main")
    # each waits at line 2 for as long as it reads at line 3 itself
    held = Site(read.file, 3, "read")
    stacks = {"phase_sites": {"data": ((held, 9), (read, 9))}, "phase_stacks": {"data": (held, loop)}}
    # one of them has been the last to get the lock for a while
    late = [steps(180.0, "data", seed=0), steps(80.0, "data", wait_ms=100.0, seed=1)]
    ranks = [rank(q, steps=late[q], loaders=(loader(workers=0, site=loop),), **stacks) for q in range(2)]
    for line, lock in (("with self.file_lock:", True), ("x = read()", False)):
        text = {read.file: f"def read(self):\n    {line}\n        return load()\n"}
        f = only(findings(job(*ranks), rule, source=text.get))
        assert (f.severity, "for a lock at store.py:2 in read" in f.message) == ("warning" if lock else "info", lock)
        assert kinds.explains(f, only(stragglers(job(*ranks))), True) is lock
        assert (str(f.advice).startswith("ranks wait there for a lock"), "set num_workers" in str(f.advice)) == (
            lock,
            not lock,
        )


def test_data_in_time_or_late_on_one_rank_only_is_not_input_bound() -> None:
    assert input_bound(steps(), steps(seed=1)) == []
    assert (
        input_bound(steps(wait_ms=60.0), steps(60.0, "data", seed=1)) == []
    )  # a straggler: the other rank has its data
    assert input_bound(steps(60.0, "data", n=20), steps(60.0, "data", n=20)) == []  # too few steps to tell
    assert input_bound(steps(60.0, "data"), ()) == []  # one rank's steps are not known
    assert input_bound(steps(60.0, "data"), steps(60.0, "data"), world_size=3) == []
