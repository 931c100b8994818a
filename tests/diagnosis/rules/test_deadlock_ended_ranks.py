"""deadlock: ranks that have ended, on hand-written snapshots of one situation of a real job each."""

from __future__ import annotations

from typing import Any

import pytest

from distdiag.diagnosis.model.snapshot import Life, Site
from distdiag.diagnosis.rules import RULES, deadlock
from tests.diagnosis.made import findings, proved
from tests.diagnosis.waits import EVAL, TRAIN, call, key, only, rank, snapshot, summary

CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:4242"


@pytest.mark.parametrize(
    ("end", "cause", "words"),
    [
        ({"life": Life.FINISHED, "exit_code": 0}, "rank_finished", "ended normally"),
        ({"life": Life.FINISHED, "exit_code": 3}, "rank_exited", "exited with code 3"),
        ({"life": Life.CRASHED, "exception": "IndexError: x"}, "rank_exited", "IndexError: x"),
        ({"life": Life.KILLED, "signal": 9}, "rank_exited", "killed by signal 9"),
        ({"life": Life.STOPPED}, "rank_stopped", "SIGSTOP"),
    ],
)
def test_a_wait_for_a_rank_that_ended_is_a_deadlock(end: dict[str, Any], cause: str, words: str) -> None:
    s = snapshot(rank(0, call()), rank(1, call()), rank(2, enqueued={"default_pg": 6}, current_site=EVAL, **end))
    f = only(s)
    assert summary(f) == ("deadlock", cause, (2,), (0, 1))
    assert f.certainty == "proved" and f.severity == "error"
    assert words in f.message and "all_reduce #7" in f.message
    assert [(w.rank, w.line) for w in f.where] == [(2, 120)]
    assert [(w.rank, w.line) for w in f.waiting] == [(0, 88), (1, 88)]
    assert f.collective is not None and (f.collective.op, f.collective.seq) == ("all_reduce", 7)


def test_a_lost_rank_is_not_also_a_deadlock() -> None:
    s = snapshot(rank(0, call()), rank(1, life=Life.KILLED, signal=9))
    assert [f.kind for f in findings(s, *RULES)] == ["rank_lost"]


def test_a_stopped_rank_moves_no_data_even_if_it_has_issued_the_call() -> None:
    s = snapshot(
        rank(0, call()), rank(1, None, life=Life.STOPPED, enqueued={"default_pg": 7}, completed={"default_pg": 6})
    )
    assert summary(only(s)) == ("deadlock", "rank_stopped", (1,), (0,))


def test_an_echo_of_an_end_is_not_its_cause() -> None:
    s = snapshot(
        rank(0, call()),
        rank(1, life=Life.CRASHED, exception="RuntimeError: Connection closed by peer", ended_s=10.0),
        rank(2, life=Life.CRASHED, exception="IndexError: list index out of range", ended_s=10.2),
    )
    f = only(s)
    assert (f.culprits, f.victims) == ((2,), (0,))


def test_a_finished_rank_that_is_not_needed_is_no_incident() -> None:
    s = snapshot(
        rank(0),
        rank(1, call(group="g", seq=1)),
        rank(2, call(group="g", seq=1)),
        rank(3, life=Life.FINISHED),
        groups={"g": (1, 2)},
    )
    assert proved(s) == []


def test_a_rank_that_evaluates_alone_through_ddp_is_the_culprit_after_the_others_end() -> None:
    """Its extra forward was paired with the others' next one long ago; all others have finished."""
    s = snapshot(
        rank(0, call("broadcast", 41), sites={key(TRAIN): 40, key(EVAL): 1}),
        *(
            rank(r, life=Life.FINISHED, exit_code=0, enqueued={"default_pg": 40}, sites={key(TRAIN): 40})
            for r in (1, 2)
        ),
    )
    assert summary(only(s)) == ("deadlock", "missing_rank", (0,), ())


def test_the_rank_that_left_early_is_the_culprit_although_the_other_is_at_a_new_site() -> None:
    s = snapshot(
        rank(0, call("all_reduce", 41, EVAL), sites={key(TRAIN): 40, key(EVAL): 1}),
        rank(1, life=Life.FINISHED, exit_code=0, enqueued={"default_pg": 40}, sites={key(TRAIN): 40}),
    )
    assert summary(only(s)) == ("deadlock", "rank_finished", (1,), (0,))


def test_a_rank_that_exits_for_a_reason_is_told_to_take_part() -> None:
    text = "def work(shard):\n    if not shard:\n        sys.exit(0)\n    gather(shard)\n"
    exits, gathers = (Site("/job/infer.py", n, "work") for n in (3, 4))
    waits = rank(0, call("all_gather", site=gathers), user_stack=(gathers,))
    ended = rank(1, enqueued={"default_pg": 6}, current_site=exits, life=Life.FINISHED, exit_code=0)
    f = only(snapshot(waits, ended), source={"/job/infer.py": text}.get)
    assert f.message.startswith("rank 1 ended before all_gather (infer.py:4): `if not shard` (line 2)")
    assert f.advice.startswith(
        "make all_gather at infer.py:4 on rank 1, too, where `if not shard` at line 2 leads past it, with its own part"
    )


@pytest.mark.parametrize(
    ("made", "caught", "found"),
    [(6, CLOSED, True), (7, CLOSED, False), (6, "ValueError: bad shape", False)],
    ids=["fewer calls", "as many", "its own error"],
)
def test_a_call_that_raised_as_a_rank_had_finished_is_found_although_every_exit_code_is_0(
    made: int, caught: str, found: bool
) -> None:
    text = "def run(tasks):\n    for task in tasks:\n        try:\n            gather(task)\n        except Exception as e:\n            log(e)\n"
    ended: dict[str, Any] = {"life": Life.FINISHED, "exit_code": 0}
    site = Site("/job/eval.py", 4, "run")
    gave_up = {"calls": (call("gather", 7, site, failed=True),), "enqueued": {"default_pg": 7}, "caught": caught}
    s = snapshot(
        *(rank(q, **gave_up, **ended) for q in (0, 1)),
        rank(2, calls=(call("gather", made, site),), enqueued={"default_pg": made}, **ended),
    )
    f = next(iter(findings(s, deadlock, source={"/job/eval.py": text}.get)), None)
    assert (f is not None) is found
    if f is not None:
        assert summary(f) == ("deadlock", "rank_finished", (2,), (0, 1)) and f.severity == "warning"
        assert f.message.startswith("rank 2 finished without gather (eval.py:4): it raised on ranks 0, 1, and the")
        assert f.advice.startswith("find what `except Exception as e` (eval.py:5) caught on rank 2")


def test_a_rank_that_caught_the_error_of_a_lost_peer_is_not_the_one_that_finished_early() -> None:
    lost = {"calls": (call("gather", 7, failed=True),), "enqueued": {"default_pg": 7}}
    s = snapshot(
        rank(0, life=Life.FINISHED, exit_code=0, caught=CLOSED, **lost),
        rank(1, life=Life.CRASHED, exception=CLOSED, ended_s=9.0, **lost),
        rank(2, life=Life.FINISHED, exit_code=0, enqueued={"default_pg": 6}),
    )
    (f,) = findings(s, deadlock)
    assert (f.culprits, f.victims) == ((2,), (1,))
