"""A rank that is at its call because it handles an exception: it is the culprit, and the finding shows the exception."""

from __future__ import annotations

from typing import Any

import pytest

from distdiag.diagnosis.model.snapshot import Site, Snapshot
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
        "it waits for standard input at train.py:40 in main, while it handles KeyError: 'device', raised at data.py:27"
        in f.message
    )
