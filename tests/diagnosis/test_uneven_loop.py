"""A loop over a DataLoader that has more batches on some ranks, and batches of another size, as the reason of a conflict."""

from __future__ import annotations

import msgspec
import pytest

from distdiag.diagnosis.model.snapshot import Loader, RankState
from tests.diagnosis.made import proved
from tests.diagnosis.waits import EVAL, TRAIN, call, only, rank, snapshot

VALIDATION = Loader(site=EVAL, length=5, batches=5, exhausted=True, iterations_started=2)


def validating(r: int, batches: int, exhausted: bool = False, passes: int = 2) -> RankState:
    loader = Loader(site=EVAL, batches=batches, exhausted=exhausted, iterations_started=passes)
    at = TRAIN if exhausted else EVAL
    return rank(
        r, call("all_reduce", 9, at, shape=(64,) if at is EVAL else (700,)), loaders=(loader,), user_stack=(at,)
    )


def test_a_validation_with_one_batch_more_on_one_rank_is_the_reason() -> None:
    f = only(snapshot(validating(0, 6), validating(1, 5, True), validating(2, 5, True)))
    assert (f.kind, f.culprits) == ("mismatch", (0,))
    assert f.message.endswith(
        f"; the loop at train.py:{EVAL.line} is at batch 6 on rank 0, and ended after 5 on ranks 1, 2"
    )
    assert "drop_last=True" in f.advice and "once after it" in f.advice


def test_without_a_collective_between_passes_the_steps_of_all_passes_count() -> None:
    """Rank 1 is in its third pass at batch 4 of 9, rank 0 has ended its third after 7: the passes before had other lengths."""

    def training(r: int, steps: int, batches: int, ended: bool) -> RankState:
        loader = Loader(site=EVAL, batches=batches, exhausted=ended, iterations_started=3, in_training=True)
        at = TRAIN if ended else EVAL
        return rank(
            r, call("barrier" if ended else "all_reduce", 9, at), loaders=(loader,), user_stack=(at,), step=steps
        )

    f = only(snapshot(training(0, 20, 7, True), training(1, 20, 4, False), training(2, 20, 4, False)))
    assert f.message.endswith(
        f"; the loop at train.py:{EVAL.line} is at step 21 on ranks 1, 2, and ended after 20 on rank 0"
    )
    f = only(snapshot(training(0, 20, 7, True), training(1, 19, 4, False), training(2, 19, 4, False)))
    assert f.culprits == (0,) and "the loop at" not in f.message


@pytest.mark.parametrize(
    "ranks",
    [
        [validating(0, 5), validating(1, 5, True), validating(2, 5, True)],
        [validating(0, 6, passes=1), validating(1, 5, True), validating(2, 5, True)],
        [validating(0, 6), validating(1, 5), validating(2, 5)],
        [validating(0, 6), rank(1, call("all_reduce", 9, TRAIN)), rank(2, call("all_reduce", 9, TRAIN))],
    ],
    ids=["not more batches", "another pass", "no end", "no loader"],
)
def test_other_loops_are_no_reason(ranks: list[RankState]) -> None:
    assert all("the loop at" not in f.message for f in proved(snapshot(*ranks)))


def test_a_loop_that_divides_the_ranks_otherwise_than_the_verdict_is_no_reason() -> None:
    """Ranks 0 and 1 are in the loop, and rank 1 alone gathers another size: the loop does not explain rank 1."""
    inside = [
        rank(
            q,
            call("all_reduce", 9, TRAIN, shape=(700 + q,)),
            loaders=(msgspec.structs.replace(VALIDATION, batches=6, exhausted=False),),
            user_stack=(EVAL,),
        )
        for q in (0, 1)
    ]
    f = only(snapshot(*inside, *(validating(q, 5, True) for q in (2, 3, 4))))
    assert f.culprits == (1,) and "the loop at" not in f.message
    inside[0] = msgspec.structs.replace(inside[0], blocked=call("all_reduce", 9, TRAIN, shape=(701,)))
    f = only(snapshot(*inside, *(validating(q, 5, True) for q in (2, 3, 4))))
    assert f.culprits == (0, 1) and "the loop at" in f.message


def test_a_size_that_is_new_on_all_ranks_is_a_last_batch() -> None:
    def gathering(r: int, rows: int) -> RankState:
        earlier = tuple(call("all_gather", n, TRAIN, shape=(64, 2)) for n in range(1, 8))
        return rank(r, call("all_gather", 8, TRAIN, shape=(rows, 2)), calls=earlier)

    f = only(snapshot(gathering(0, 17), gathering(1, 16), gathering(2, 16)))
    assert (f.cause, f.culprits) == ("shape", (0,))
    assert "before, all ranks called it with 128 elements (7 times)" in f.message
    assert f.advice.startswith("a batch is smaller than before")
