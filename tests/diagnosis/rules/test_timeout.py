"""timeout: which rank was late when a collective timed out, and what only looks like a timeout."""

from __future__ import annotations

from typing import Any

import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    Call,
    Life,
    RankState,
    Site,
    Snapshot,
)
from distdiag.diagnosis.rules import deadlock, mismatch, rank_lost, timeout
from tests.diagnosis.made import findings, job, only, rank


def ended(s: Snapshot, **known: Any) -> list[Finding]:
    return findings(s, timeout, mismatch, deadlock, rank_lost, **known)


TIMED_OUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"


@pytest.mark.parametrize("number", [None, 9])
def test_a_rank_killed_after_anothers_timeout_was_alive_and_late(number: int | None) -> None:
    """Its launcher's SIGTERM shows as no signal if the launcher reaped it first."""
    s = job(
        rank(0, life=Life.CRASHED, exception=TIMED_OUT, ended_s=9.0),
        rank(1, life=Life.KILLED, signal=number, ended_s=9.4),
    )
    f = only(ended(s, late=((1,), (0,))))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("timeout", "late_rank", (1,), (0,))


def test_a_timeout_names_the_late_rank() -> None:
    text = "RuntimeError: Timed out waiting 6000ms for recv operation to complete (gloo)"
    waiting = Call(op="all_reduce", group="default_pg", seq=7, entered_s=3.0, failed=True)
    s = job(
        rank(0, life=Life.CRASHED, exception=text, ended_s=9.0, calls=(waiting,), enqueued={"default_pg": 7}),
        rank(1, enqueued={"default_pg": 6}),
    )
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("timeout", "late_rank", (1,), (0,))


@pytest.mark.parametrize(("step", "where"), [(0, "before init_process_group"), (7, "outside the step")])
def test_work_that_is_late_before_the_first_step_is_not_told_to_leave_the_step(step: int, where: str) -> None:
    failed = rank(0, life=Life.CRASHED, exception=TIMED_OUT, ended_s=9.0, step=step)
    f = only(ended(job(failed, rank(1)), late=((1,), (0,))))
    assert f.advice.startswith(f"do that work on all ranks, or {where}, ")


def test_a_start_that_times_out_names_the_rank_that_was_never_seen() -> None:
    text = "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 2/3 clients joined."
    name, site = "init_process_group 1", Site("/job/begin.py", 6, "main")
    call = Call(op="init_process_group", group=name, seq=1, entered_s=3.0, site=site)
    failed = {"life": Life.CRASHED, "exception": text, "current_site": site, "calls": (call,), "enqueued": {name: 1}}
    s = job(*(rank(q, ended_s=64.0 + q, **failed) for q in (0, 1)), world_size=3)
    f = only(ended(s, late=((2,), (0, 1))))
    assert f.message == (
        "init_process_group() timed out on ranks 0, 1 at begin.py:6 in main: rank 2 was never seen and had not come to it for 61 s"
    )
    assert (f.kind, f.culprits, f.certainty, f.where) == ("timeout", (2,), "suspected", ())


def test_a_timeout_raised_by_user_code_is_a_crash() -> None:
    s = job(rank(0, life=Life.CRASHED, exception="TimeoutError: dataset server timed out", ended_s=9.0), rank(1))
    assert only(ended(s)).kind == "rank_lost"


def on_device(q: int, **more: Any) -> RankState:
    """Return a rank on NCCL whose device had an all_reduce open for 6 seconds until the rank ended at 20.0."""
    call = Call(op="all_reduce", group="default_pg", seq=7, entered_s=14.0, left_s=14.0, on_device=True)
    return rank(q, **{
        "calls": (call,), "queued": (call,), "wait_measured": False, "ended_waiting": True, "life": Life.KILLED, "signal": 6,
        "ended_s": 20.0, "enqueued": {"default_pg": 7}, "completed": {"default_pg": 6}, **more,
    })  # fmt: skip


def test_the_watchdog_of_a_device_backend_that_aborts_a_rank_is_a_timeout() -> None:
    """Next, the launcher ends the late rank, with a signal that is not recorded."""
    late = rank(1, life=Life.KILLED, ended_s=20.3, wait_measured=False, enqueued={"default_pg": 6})
    f = only(ended(job(on_device(0), late), late=((1,), (0,))))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("timeout", "late_rank", (1,), (0,))
    assert "late by more than 6.0 s" in f.message


def test_an_abort_soon_after_the_operation_began_is_not_a_timeout() -> None:
    first = on_device(0, ended_s=14.5)
    f = only(ended(job(first, rank(1, life=Life.KILLED, signal=15, ended_s=15.0, wait_measured=False))))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", "killed", (0,))
