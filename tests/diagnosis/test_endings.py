"""Rules on ranks that have ended: what ended them, and who is the culprit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.job_state import job_state
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    Call,
    Group,
    Life,
    RankState,
    Site,
    Snapshot,
)
from distdiag.diagnosis.rules import deadlock, mismatch, rank_lost, timeout
from distdiag.diagnosis.waits.graph import build
from tests.diagnosis.made import LOOP, findings, job, only, proved, rank


def ended(s: Snapshot, **known: Any) -> list[Finding]:
    return findings(s, timeout, mismatch, deadlock, rank_lost, **known)


def how_it_ended(*ranks: RankState) -> str:
    s = job(*ranks)
    return job_state(s, build(s), [], final=True)[1]


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ({"life": Life.KILLED, "signal": 15}, "SIGTERM"),
        ({"life": Life.KILLED, "signal": 2}, "SIGINT"),
        ({"life": Life.CRASHED, "exception": "KeyboardInterrupt"}, "SIGINT"),
    ],
)
def test_a_job_stopped_from_outside_is_not_reported_as_a_crash(end: dict[str, Any], name: str) -> None:
    text = how_it_ended(rank(0, ended_s=9.0, **end), rank(1, life=Life.KILLED, signal=15, ended_s=9.2))
    assert text == f"stopped by {name} (from the launcher or a person)"
    crashed = rank(1, life=Life.CRASHED, exception="ValueError: x", ended_s=8.0)
    assert how_it_ended(rank(0, ended_s=9.0, **end), crashed) == "rank 1: ValueError: x; 2 of 2 failed"


def test_the_text_of_an_exception_is_cut_between_words() -> None:
    text = how_it_ended(rank(0, life=Life.CRASHED, exception="ValueError: " + "label " * 60, ended_s=9.0))
    assert text.endswith("label label …; 1 of 1 failed") and len(text) < 160


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:59009"


def test_ranks_that_could_not_connect_blame_nobody() -> None:
    text = "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused"
    crashed = rank(0, life=Life.CRASHED, exception=text, ended_s=9.0)
    s = job(crashed, rank(1, life=Life.KILLED, signal=15, ended_s=9.5))
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("rank_lost", "crashed", (), (0,))
    assert "connectFullMesh" in f.message and "SOCKET_IFNAME" in f.advice


def test_the_first_end_that_is_not_an_echo_is_the_cause() -> None:
    s = job(
        rank(0, life=Life.CRASHED, exception=CLOSED, ended_s=9.0),
        rank(1, life=Life.CRASHED, exception="IndexError: list index out of range", ended_s=9.1),
        rank(2, life=Life.KILLED, signal=15, ended_s=9.5),
    )
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("rank_lost", "crashed", (1,), (0, 2))
    assert "IndexError" in f.message


def test_the_same_error_on_all_ranks_blames_all_of_them() -> None:
    s = job(
        *(rank(q, life=Life.CRASHED, exception="NameError: name 'x' is not defined", ended_s=9.0) for q in range(3))
    )
    assert only(ended(s)).culprits == (0, 1, 2)


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV")])
def test_a_killed_rank_is_lost_with_its_signal(number: int, name: str) -> None:
    s = job(
        rank(0, life=Life.KILLED, signal=number, ended_s=9.0), rank(1, life=Life.CRASHED, exception=CLOSED, ended_s=9.2)
    )
    f = only(ended(s))
    assert (f.cause, f.culprits) == ("killed", (0,)) and name in f.message


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


@pytest.mark.parametrize(("last_beat_s", "culprits"), [(8.9, (1,)), (9.3, ())])
def test_a_kill_after_a_later_heartbeat_is_not_the_cause_of_a_closed_connection(
    last_beat_s: float, culprits: tuple[int, ...]
) -> None:
    s = job(
        rank(0, life=Life.CRASHED, exception=CLOSED, ended_s=9.0),
        rank(1, life=Life.KILLED, signal=9, ended_s=9.4, heartbeat_age_s=10.0 - last_beat_s),
        t_s=10.0,
    )
    assert tuple(q for f in ended(s) for q in f.culprits) == culprits


@pytest.mark.parametrize("number", [2, 9, 15])
def test_a_job_ended_from_outside_has_no_finding(number: int) -> None:
    s = job(*(rank(q, life=Life.KILLED, signal=number, ended_s=9.0 + q / 10) for q in range(3)))
    assert ended(s) == []


def test_a_rank_that_finished_early_is_the_cause_of_the_others_errors() -> None:
    s = job(
        rank(0, life=Life.FINISHED, ended_s=8.0, step=48),
        rank(
            1,
            life=Life.CRASHED,
            exception=CLOSED,
            ended_s=9.0,
            enqueued={"default_pg": 60},
            completed={"default_pg": 59},
        ),
    )
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("deadlock", "rank_finished", (0,), (1,))


def test_a_timeout_names_the_late_rank() -> None:
    text = "RuntimeError: Timed out waiting 6000ms for recv operation to complete (gloo)"
    waiting = Call(op="all_reduce", group="default_pg", seq=7, entered_s=3.0, failed=True)
    s = job(
        rank(0, life=Life.CRASHED, exception=text, ended_s=9.0, calls=(waiting,), enqueued={"default_pg": 7}),
        rank(1, enqueued={"default_pg": 6}),
    )
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("timeout", "late_rank", (1,), (0,))


def test_a_timeout_raised_by_user_code_is_a_crash() -> None:
    s = job(rank(0, life=Life.CRASHED, exception="TimeoutError: dataset server timed out", ended_s=9.0), rank(1))
    assert only(ended(s)).kind == "rank_lost"


@pytest.mark.parametrize(("log", "culprits"), [((61, 121, 181), (1,)), ((61, 121, 170), (0,)), ((1, 50, 121, 170), ())])
def test_in_an_abort_by_gloo_the_rhythm_decides_between_two_sites(
    log: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    """Rank 0 was in a call that both know, rank 1 in the next backward: was that call due, or too early?"""
    call = Call(op="all_reduce", group="default_pg", seq=log[-1], site=Site("/job/train.py", 8, "log"), shape=(4,))
    before = {"default_pg": {"/job/train.py:8": log[:-1]}}
    sites = {"/job/train.py:8": 3, f"{LOOP.file}:{LOOP.line}": 170}
    s = job(
        rank(0, life=Life.KILLED, signal=6, ended_s=40.0, ended_waiting=True, place=call.site, calls=(call,), sites=sites,
             visits={"default_pg": {"/job/train.py:8": log}}),
        rank(1, life=Life.CRASHED, exception="RuntimeError: Connection reset by peer", ended_s=40.1, place=LOOP, sites=sites,
             visits=before),
    )  # fmt: skip
    s = msgspec.structs.replace(s, groups={"default_pg": Group(name="default_pg", ranks=(0, 1), backend="gloo")})
    f = only(ended(s))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", culprits)
    assert ("collectives" in f.message) == bool(culprits)


UNUSED = "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss"


def test_a_failed_job_always_has_a_finding() -> None:
    """DDP's refusal without names, in a library's words; and a job of which only the echoes were seen."""
    refused = job(*(rank(q, life=Life.CRASHED, exception=UNUSED, ended_s=9.0, models=()) for q in range(2)))
    f = only(ended(refused))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", "crashed", (0, 1))
    assert "find_unused_parameters" in f.advice
    echoes = job(*(rank(q, life=Life.CRASHED, exception=CLOSED, ended_s=9.0) for q in range(2)))
    f = only(ended(echoes))
    assert (f.kind, f.culprits, f.victims) == ("rank_lost", (), (0, 1))
    assert f.certainty == "suspected"


def test_a_job_that_was_ended_from_outside_blames_nobody() -> None:
    assert ended(job(*(rank(q, life=Life.KILLED, signal=15, ended_s=9.0) for q in range(2)))) == []


def test_an_exit_is_reported_with_the_condition_that_guards_it() -> None:
    source = "def train():\n    if not isfinite(loss):\n        print(loss)\n        sys.exit(1)\n"
    place = Site("/job/engine.py", 4, "train")
    s = job(rank(0), rank(1, life=Life.CRASHED, exit_code=1, ended_s=9.0, place=place, user_stack=(place,)))
    f = only(ended(s, source=lambda _: source))
    assert (f.kind, f.culprits) == ("rank_lost", (1,))
    assert "exit code 1 at engine.py:4 in train, under `if not isfinite(loss)` at line 2" in f.message


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


def test_a_rank_that_is_killed_before_the_others_watchdogs_abort_them_is_lost() -> None:
    killed = rank(1, life=Life.KILLED, signal=9, ended_s=13.0, wait_measured=False)
    f = only(ended(job(on_device(0), killed)))
    assert (f.kind, f.cause, f.culprits) == ("rank_lost", "killed", (1,))


def test_ranks_that_died_of_a_mismatch_are_shown_at_the_call() -> None:
    metric, backward = Site("/job/train.py", 6, "log_metric"), Site("/job/train.py", 15, "main")
    calls = {q: Call(op="all_reduce", group="default_pg", seq=7, dtype=d, shape=(1,), site=metric, entered_s=99.0)
             for q, d in ((0, "int64"), (1, "float32"))}  # fmt: skip
    s = job(
        rank(
            0,
            life="crashed",
            place=backward,
            enqueued={"default_pg": 7},
            calls=(calls[0],),
            exception="RuntimeError: reset",
        ),
        rank(1, life="killed", signal=6, place=backward, enqueued={"default_pg": 7}, calls=(calls[1],)),
    )
    f = only(proved(s))
    assert (f.kind, f.cause) == ("mismatch", "dtype")
    assert {(w.rank, w.line) for w in (*f.where, *f.waiting)} == {(0, 6), (1, 6)}


@pytest.mark.parametrize(("usual", "odd"), [((8, 8), (1,)), ((9, 8), ())])
def test_gloo_aborts_a_rank_in_an_all_to_all_whose_split_sizes_do_not_fit(usual: tuple[int, int], odd: tuple) -> None:
    route = Site("/job/train.py", 5, "route")

    def call(seq: int, shape: tuple[int, int], completed_s: float | None) -> Call:
        return Call(op="all_to_all_single", group="default_pg", seq=seq, shape=shape, site=route, entered_s=seq + 90.0,
                    completed_s=completed_s)  # fmt: skip

    ends = {
        0: {"life": "killed", "signal": 6},
        1: {"life": "crashed", "exception": "RuntimeError: Connection reset by peer"},
    }
    last = {0: (8, 8), 1: (9, 8)}
    before = {0: (8, 8), 1: usual}
    s = job(
        *(
            rank(
                q, place=route, ended_waiting=True, ended_s=99.0, enqueued={"default_pg": 7}, **ends[q],
                calls=(*(call(n, before[q], n + 90.1) for n in (4, 5, 6)), call(7, last[q], None)),
            )
            for q in (0, 1)
        )
    )  # fmt: skip
    f = only(findings(s, mismatch, rank_lost))
    assert (f.kind, f.cause, f.culprits) == ("mismatch", "shape", odd)
    assert "rank 0 8x8, rank 1 9x8" in f.message and "split sizes" in f.advice


def test_gloo_aborts_a_rank_whose_message_is_longer_than_its_receive() -> None:
    """Stages of a pipeline: no collective is involved."""

    def stage(q: int, op: str, line: int, **end: Any) -> RankState:
        site = Site("/job/train.py", line, "run")
        message = Call(op=op, group="default_pg", peer=1 - q, nth=9, shape=(4,), site=site, entered_s=98.0)
        return rank(q, place=site, ended_waiting=True, ended_s=99.0, calls=(message,), **end)

    s = job(
        stage(0, "irecv", 49, life="killed", signal=6),
        stage(1, "isend", 57, life="crashed", exception="RuntimeError: Connection reset by peer"),
    )
    f = only(findings(s, mismatch, rank_lost))
    assert f.message.startswith("ranks exchanged messages of different sizes, and gloo aborted rank 0")
    assert "collective" not in f.message + f.advice


def test_an_aborted_rank_is_judged_with_the_rank_that_the_launcher_killed_in_its_call() -> None:
    """torchrun's SIGTERM may arrive before the exception of the rank that lost its peer."""
    validate, backward = Site("/job/train.py", 14, "reduce_mean"), Site("/job/train.py", 38, "main")
    aborted = rank(
        0,
        life="killed",
        signal=6,
        ended_s=99.0,
        ended_waiting=True,
        place=validate,
        sites={validate.key: 1, backward.key: 60},
    )
    swept = rank(
        1, life="killed", signal=15, ended_s=99.1, ended_waiting=True, place=backward, sites={backward.key: 60}
    )
    f = only(findings(job(aborted, swept), mismatch, rank_lost))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("mismatch", "shape", (0,), (1,))
    busy = msgspec.structs.replace(
        swept, ended_waiting=False
    )  # killed in its own code, which shows nothing about the call
    assert only(findings(job(aborted, busy), mismatch, rank_lost)).kind == "rank_lost"
