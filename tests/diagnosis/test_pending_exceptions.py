"""A rank that is at its call because it handles an exception: it is the culprit, and the finding shows the exception."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.model.snapshot import Call, RankState, Site, Snapshot
from distdiag.diagnosis.rules import stall
from tests.diagnosis.made import findings, waits_for_rank_one
from tests.diagnosis.waits import EVAL, SAVE, TRAIN, call, key, only, rank, snapshot, summary

BOTH = {key(SAVE): 4, key(TRAIN): 4}
READ = Site("/job/data.py", 27, "batch")
RAISED: dict[str, Any] = {"handling": "KeyError: 'device'", "handling_site": READ}


def saved_early(mine: dict[str, Any], theirs: dict[str, Any]) -> Snapshot:
    """Two ranks at two sites that both know: rank 1 in the barrier of a save, rank 0 in the next step."""
    return snapshot(
        rank(0, call("broadcast", 9, TRAIN, root=0), sites=BOTH, **theirs),
        rank(1, call("barrier", 9, SAVE), sites=BOTH, **mine),
    )


def test_of_two_ranks_the_one_that_handles_an_exception_is_the_culprit() -> None:
    f = only(saved_early(RAISED, {}))
    assert summary(f) == ("deadlock", "missing_rank", (1,), (0,))
    assert f.message.startswith("rank 1 is handling KeyError: 'device', raised at data.py:27 in batch; ")
    assert f.advice.startswith("fix the KeyError at data.py:27 in batch") and "let the exception end rank 1" in f.advice


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({}, {}),
        (RAISED, RAISED),
        ({"handling": "RuntimeError: Connection closed by peer [127.0.0.1]:4242"}, {}),
        ({"handling": "RuntimeError: Timed out waiting 8000ms for recv operation to complete"}, {}),
        ({"handling": "StopIteration"}, {}),
    ],
    ids=["none", "both", "a peer that ended", "a late peer", "control flow"],
)
def test_exceptions_that_all_have_or_that_another_rank_caused_blame_nobody(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    f = only(saved_early(mine, theirs))
    assert f.culprits == () and "handling" not in f.message


def test_a_majority_decides_first_and_the_exception_explains() -> None:
    s = snapshot(
        *(rank(r, call(), sites={key(TRAIN): 7}) for r in (0, 1)),
        rank(2, call("barrier", 7, SAVE), sites={key(SAVE): 1, key(TRAIN): 6}, **RAISED),
    )
    f = only(s)
    assert f.culprits == (2,) and "rank 2 is handling KeyError: 'device'" in f.message


def test_in_a_cycle_of_groups() -> None:
    s = snapshot(
        rank(0, call(group="a", seq=5, site=TRAIN), sites=BOTH),
        rank(1, call(group="b", seq=3, site=EVAL), sites={**BOTH, key(EVAL): 2}, **RAISED),
        groups={"a": (0, 1), "b": (0, 1)},
    )
    f = only(s)
    assert summary(f) == ("deadlock", "missing_rank", (1,), (0,))
    assert f.message.startswith("rank 1 is handling KeyError: 'device', raised at data.py:27 in batch; ")


def test_a_stall_shows_the_exception_that_its_rank_handles() -> None:
    s = waits_for_rank_one(80.0, 100.0, activity="stdin", **RAISED)
    (f,) = findings(s, stall)
    assert (
        "rank 1 waits for standard input at train.py:40 in main, while it handles KeyError: 'device', raised at data.py:27"
        in f.message
    )


TIMED_OUT = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("caught", "came_s", "text"),
    [
        (TIMED_OUT, 32.0, "timed out on rank 0 after 4.0 s, before rank 1 came there, 12 s late; ranks 0, 2 went on"),
        (TIMED_OUT, None, "timed out on rank 0 after 4.0 s, before rank 1 came there; ranks 0, 2 went on"),
        ("RuntimeError: invalid device", 20.5, "raised RuntimeError: invalid device on rank 0 after 4.0 s; ranks 0, 2"),
    ],
)
def test_an_error_of_a_collective_that_some_ranks_caught_explains_where_they_are(
    caught: str, came_s: float | None, text: str
) -> None:
    def ended(raised: bool, entered_s: float) -> Call:
        completed = None if raised else entered_s
        return call(
            "monitored_barrier", 5, EVAL, group="check", entered_s=entered_s, failed=raised, completed_s=completed
        )

    def gone_on(q: int, caught_s: float) -> RankState:
        return rank(
            q, call("barrier", 9, SAVE), sites=BOTH, calls=(ended(True, 20.0),), caught=caught, caught_s=caught_s
        )

    late = (ended(False, came_s),) if came_s is not None else ()
    rank_1 = rank(1, call("all_reduce", 9, TRAIN), sites=BOTH, calls=late)
    f = only(snapshot(gone_on(0, 24.0), rank_1, gone_on(2, 30.0)))
    assert f.culprits == (1,) and f"before that, monitored_barrier (train.py:120) {text}" in f.message
    assert "ranks 0, 2 caught it" in f.advice and ("made rank 1 late" in f.advice) is ("came" in text)


def test_an_error_before_a_later_collective_that_completed_explains_nothing() -> None:
    old, since = call("barrier", 5, EVAL, entered_s=20.0, failed=True), call(seq=8, entered_s=25.0, completed_s=25.1)
    states = [
        rank(q, call(op, 9, at), sites=BOTH) for q, (op, at) in enumerate((("barrier", SAVE), ("all_reduce", TRAIN)))
    ]
    states[0] = msgspec.structs.replace(states[0], calls=(old, since), caught=TIMED_OUT, caught_s=24.0)
    assert "timed out" not in only(snapshot(*states)).message


SKIP = """def train_step():
    try:
        loss.backward()
    except RuntimeError as e:
        oom = True
    gather(oom)
"""


@pytest.mark.parametrize(("caught_s", "known"), [(48.0, True), (None, False)], ids=["known", "by the source alone"])
def test_ranks_that_caught_an_error_are_the_culprits_although_they_are_the_majority(
    caught_s: float | None, known: bool
) -> None:
    backward, gather = (Site("/job/train.py", n, "train_step") for n in (3, 6))
    before = call(seq=6, entered_s=40.0, completed_s=41.0)
    error = {"caught": "OutOfMemoryError: CUDA out of memory", "caught_s": caught_s} if known else {}

    def at(q: int, op: str, site: Site, times: int = 12, **more: Any) -> RankState:
        sites = {key(backward): times, key(gather): 12}
        return rank(q, call(op, 7, site, entered_s=48.1), calls=(before,), user_stack=(site,), sites=sites, **more)

    gathering = [at(q, "all_gather", gather, **error) for q in (0, 1)]
    f = only(snapshot(*gathering, at(2, "all_reduce", backward, 13)), source={"/job/train.py": SKIP}.get)
    assert f.culprits == (0, 1) and ("caught OutOfMemoryError: CUDA out of memory" in f.message) is known
    assert f.message.startswith("ranks 0, 1 skipped all_reduce (train.py:3): `except RuntimeError as e` (line 4); ")
    found = "fix what raised OutOfMemoryError on" if known else "find what `except RuntimeError as e`"
    assert f.advice.startswith(found) and "re-raise it, so that all ranks end" in f.advice
    # an error of long ago has led no rank there, nor a handler past a call that all have made equally often
    gathering = [at(q, "all_gather", gather, **{**error, "caught_s": 30.0}) for q in (0, 1)]
    same = snapshot(*gathering, at(2, "all_reduce", backward))
    assert only(same, source={"/job/train.py": SKIP}.get).culprits == (2,)
