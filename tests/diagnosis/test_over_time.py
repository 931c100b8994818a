"""Findings over time: when they are said, kept and withdrawn."""

from __future__ import annotations

from typing import Any

import pytest

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.snapshot import (
    Call,
    Life,
    Site,
    Snapshot,
)
from tests.diagnosis.made import LOOP, job, only, rank, waits_for_rank_one


def test_a_stall_is_withdrawn_when_the_rank_comes_and_its_record_stays() -> None:
    d = Diagnosis(source=lambda _: None)
    for t in range(30):
        d.update(waits_for_rank_one(1.0, float(t), activity="user_code"))
    assert [f.kind for f in d.open()] == ["stall"] and d.state == "stalled"
    for t in range(30, 34):
        d.update(job(rank(0, step=101), rank(1, step=101), t_s=float(t)))
    assert d.open() == [] and d.state == "running"
    f = only(d.findings)
    assert f.cleared_s is not None and d.recovered[1] > 20.0


@pytest.mark.parametrize(("life", "open_still"), [(Life.FINISHED, 0), (Life.KILLED, 1)])
def test_a_stall_is_over_when_all_have_ended_well(life: str, open_still: int) -> None:
    d = Diagnosis(source=lambda _: None)
    for t in range(30):
        d.update(waits_for_rank_one(1.0, float(t), activity="user_code"))
    ended = job(
        *(rank(q, life=life, ended_s=30.0, signal=9 if life == Life.KILLED else None) for q in (0, 1)), t_s=30.1
    )
    d.update(ended, final=True)
    assert len([f for f in d.open() if f.kind == "stall"]) == open_still


def test_what_was_said_of_a_stall_stays_while_its_ranks_are_being_killed() -> None:
    def waiting(t_s: float, activity: str) -> Snapshot:
        call = Call(op="all_reduce", group="default_pg", seq=9, entered_s=1.0, site=LOOP)
        waits = [rank(q, blocked=call, enqueued={"default_pg": 9}, activity="waiting") for q in (0, 1)]
        return job(*waits, rank(2, enqueued={"default_pg": 8}, activity=activity), t_s=t_s)

    d = Diagnosis(source=lambda _: None)
    for t in range(40):
        d.update(waiting(float(t), "queue"))
    f = only(d.open())
    assert f.severity == "error" and "waits on a queue" in f.message
    dying = waiting(40.0, "user_code")  # it has left its queue, and more is not known of it any more
    dying.ranks[0] = rank(0, life=Life.KILLED, ended_s=39.9, signal=15, enqueued={"default_pg": 9})
    assert d.update(dying) == [] and only(d.open()) == f


def test_a_proof_needs_two_looks_and_is_kept_when_the_job_is_killed() -> None:
    def stuck(t_s: float, life: str = Life.RUNNING, **more: Any) -> Snapshot:
        ranks = [
            rank(q, life=life, enqueued={"default_pg": 7}, activity="waiting", sites={"/job/train.py:40": 5},
                 blocked=None if life != Life.RUNNING else Call(
                     op=op, group="default_pg", seq=7, entered_s=5.0, site=Site("/job/train.py", line, "f")),
                 **more)
            for q, (op, line) in enumerate([("barrier", 9), ("all_reduce", 40), ("all_reduce", 40)])
        ]  # fmt: skip
        return job(*ranks, t_s=t_s)

    d = Diagnosis(source=lambda _: None)
    assert d.update(stuck(6.0)) == []
    f = only(d.update(stuck(6.25)))
    assert f.kind in ("deadlock", "mismatch") and f.certainty == "proved" and f.culprits == (0,)
    assert d.state == "deadlocked"
    for t in (7.0, 8.0, 12.0):
        assert d.update(stuck(t, Life.KILLED, signal=9, ended_s=6.9)) == []
    assert only(d.findings) == f
