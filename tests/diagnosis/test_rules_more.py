"""More of the rules: each says what it is for, and abstains where its input is missing, or ordinary."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis import batches, gpus, parameters, resources, speed, stalls
from distdiag.diagnosis.findings import Finding
from distdiag.diagnosis.graph import build
from distdiag.diagnosis.snapshot import Call, GpuState, Loader, Model, Sample, Site, Snapshot, Step
from tests.diagnosis.test_rules import LOOP, MODEL, job, loader, only, rank, steps, waits_for_rank_one

GIB = 1 << 30
CARD = GpuState(node=0, gpu=0, rank=1, pcie_width=8, pcie_width_max=16)


def of_kind(found: list[Finding], kind: str, cause: str | None = None) -> list[Finding]:
    return [f for f in found if f.kind == kind and (cause is None or f.cause == cause)]


# -- device memory -----------------------------------------------------------------------------------------


def headroom(*used_gib: float | None, card_gib: float | None = 80.0) -> list[Finding]:
    total = None if card_gib is None else int(card_gib * GIB)
    ranks = [
        rank(q, device_bytes=None if used is None else int(used * GIB), device_total_bytes=total)
        for q, used in enumerate(used_gib)
    ]
    return of_kind(resources.rules(job(*ranks)), "memory", "headroom")


def test_a_card_that_is_nearly_full_is_said_with_its_rank() -> None:
    f = only(headroom(40.0, 78.0))
    assert (f.culprits, f.certainty) == ((1,), "proved") and "device memory of rank 1" in f.message
    assert only(headroom(78.0, 78.0)).culprits == (0, 1)


def test_a_card_with_room_or_of_unknown_size_is_not_worth_a_word() -> None:
    assert headroom(40.0, 75.0) == []  # 94 %: tuned to be nearly full
    assert headroom(None, None) == []
    assert headroom(78.0, 78.0, card_gib=None) == []


# -- the bus of a card -------------------------------------------------------------------------------------


def test_a_card_on_fewer_lanes_than_it_has_is_said() -> None:
    f = only(gpus.rules(job(rank(0), rank(1), gpus=(CARD,))))
    assert (f.kind, f.cause, f.severity, f.culprits) == ("gpu", "pcie_degraded", "warning", (1,))
    assert "x8 of x16" in f.message and "distdiag probe gpu" in f.advice
    unused = msgspec.structs.replace(CARD, rank=None)  # a card of nobody: said, and nobody is blamed
    assert only(gpus.rules(job(rank(0), rank(1), gpus=(unused,)))).culprits == ()


@pytest.mark.parametrize(
    ("width", "most"), [(16, 16), (8, 8), (None, 16), (8, None), (None, None)], ids=lambda w: f"x{w}"
)
def test_a_full_or_unknown_width_is_no_fault(width: int | None, most: int | None) -> None:
    card = msgspec.structs.replace(CARD, pcie_width=width, pcie_width_max=most)
    assert gpus.rules(job(rank(0), rank(1), gpus=(card,))) == []


# -- the GIL -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waited_s", "severity"), [(9.0, "warning"), (25.0, "error")])
def test_a_rank_stuck_in_native_code_stalls_the_others(waited_s: float, severity: str) -> None:
    s = waits_for_rank_one(100.0 - waited_s, 100.0, activity="gil_held")
    f = only(stalls.rules(s, build(s)))
    assert (f.kind, f.cause, f.severity, f.certainty) == ("stall", "gil_held", severity, "suspected")
    assert (f.culprits, f.victims) == ((1,), (0,))
    assert f.where[0].state == "gil_held" and (f.where[0].file, f.where[0].line) == (LOOP.file, LOOP.line)
    assert "holds the GIL" in f.message and "native call" in f.advice


def test_native_code_that_nobody_waits_for_long_is_no_stall() -> None:
    s = waits_for_rank_one(95.0, 100.0, activity="gil_held")
    assert stalls.rules(s, build(s)) == []
    alone = job(rank(0, enqueued={"default_pg": 6}), rank(1, enqueued={"default_pg": 6}, activity="gil_held"))
    assert stalls.rules(alone, build(alone)) == []
    unknown = Call(op="all_reduce", group="default_pg", seq=7, entered_s=None)  # since when is not known
    s = job(
        rank(0, blocked=unknown, enqueued={"default_pg": 7}, activity="waiting"),
        rank(1, enqueued={"default_pg": 6}, activity="gil_held"),
    )
    assert stalls.rules(s, build(s)) == []


# -- find_unused_parameters --------------------------------------------------------------------------------

SEARCHED = msgspec.structs.replace(
    MODEL, find_unused=True, site=Site("/job/train.py", 12, "build"), unused_checks=60, search_ms=2.0
)


def not_needed(*models: Model, usual_step_s: float | None = 0.1) -> list[Finding]:
    ranks = [rank(q, models=(m,)) for q, m in enumerate(models)]
    return of_kind(parameters.rules(job(*ranks, usual_step_s=usual_step_s)), "unused_parameters")


def test_a_search_that_never_found_anything_is_said_with_its_cost() -> None:
    f = only(not_needed(SEARCHED, SEARCHED))
    assert (f.cause, f.severity, f.certainty) == ("flag_not_needed", "warning", "suspected")
    assert (f.culprits, f.victims, f.names) == ((), (0, 1), ())  # the script's doing, no rank's
    assert [(w.rank, w.file, w.line) for w in f.where] == [(0, "/job/train.py", 12), (1, "/job/train.py", 12)]
    assert "2.0 ms per step (2 % of it)" in f.cost


def test_a_search_that_a_library_asked_for_is_no_fault_of_the_script() -> None:
    f = only(not_needed(*[msgspec.structs.replace(SEARCHED, flag_of_library=True)] * 2))
    assert (f.cause, f.severity) == ("flag_not_needed", "info") and "ddp_find_unused_parameters" in f.advice


def test_a_search_that_found_something_once_on_one_rank_is_needed() -> None:
    hit = msgspec.structs.replace(SEARCHED, unused=(("head.weight", 40),), unused_hits=1, unused_step=9)
    assert of_kind(not_needed(SEARCHED, hit), "unused_parameters", "flag_not_needed") == []


@pytest.mark.parametrize(
    "change",
    [{"unused_checks": 39}, {"search_ms": None}, {"search_ms": 0.05}, {"find_unused": False}],
    ids=["few looks", "not timed", "costs nothing", "no flag"],
)
def test_a_search_not_known_well_or_not_dear_is_not_worth_a_word(change: dict[str, Any]) -> None:
    assert not_needed(*[msgspec.structs.replace(SEARCHED, **change)] * 2) == []


def test_the_cost_of_a_search_needs_the_usual_step_and_all_ranks() -> None:
    for unknown in ({"unused_checks": 3}, {"search_ms": None}):
        assert not_needed(SEARCHED, msgspec.structs.replace(SEARCHED, **unknown)) == []
    assert not_needed(SEARCHED, SEARCHED, usual_step_s=None) == []
    s = job(rank(0, models=(SEARCHED,)), rank(1, models=(SEARCHED,)), usual_step_s=0.1, world_size=3)
    assert of_kind(parameters.rules(s), "unused_parameters") == []  # the third has not reported


# -- parameters unused on some ranks -----------------------------------------------------------------------


def unused(*names: str) -> Model:
    return msgspec.structs.replace(MODEL, unused=tuple((n, 10) for n in names), unused_hits=3, unused_step=9)


def test_a_branch_that_one_rank_skips_is_told_from_one_that_all_skip() -> None:
    waits = Call(op="all_reduce", group="default_pg", seq=7, entered_s=90.0)
    s = job(rank(0), rank(1, models=(unused("aux.weight", "aux.bias"),)), rank(2, blocked=waits, phase="backward"))
    f = only(of_kind(parameters.rules(s), "unused_parameters"))
    assert (f.cause, f.severity, f.certainty) == ("differs_between_ranks", "error", "proved")
    assert (f.culprits, f.victims, f.names) == ((1,), (0, 2), ("aux.weight", "aux.bias"))
    assert "(20 elements) got no gradient on rank 1" in f.message


def test_ranks_that_skip_different_branches_are_all_in_it() -> None:
    s = job(rank(0, models=(unused("left.weight"),)), rank(1, models=(unused("right.weight"),)))
    f = only(of_kind(parameters.rules(s), "unused_parameters"))
    assert (f.cause, f.culprits, f.victims) == ("differs_between_ranks", (), (0, 1))
    assert f.names == ("left.weight", "right.weight")


def test_a_difference_that_nothing_has_come_of_is_no_alarm() -> None:
    """The looks of two ranks may have fallen on different steps."""
    f = only(of_kind(parameters.rules(job(rank(0), rank(1, models=(unused("aux.weight"),)))), "unused_parameters"))
    assert (f.cause, f.severity) == ("differs_between_ranks", "info")


def test_a_rank_that_was_not_looked_at_is_not_said_to_differ() -> None:
    unknown = msgspec.structs.replace(MODEL, unused_checks=0)
    for s in (
        job(rank(0, models=(unknown,)), rank(1, models=(unused("aux.weight"),))),
        job(rank(0, models=()), rank(1, models=(unused("aux.weight"),))),
    ):
        assert only(of_kind(parameters.rules(s), "unused_parameters")).cause == "never_used"
    assert of_kind(parameters.rules(job(rank(0), rank(1))), "unused_parameters") == []


# -- size of batches ---------------------------------------------------------------------------------------


def of_size(*sizes: int, n: int = 40) -> tuple[Step, ...]:
    """Steps with these local batch sizes, over and over."""
    return tuple(
        msgspec.structs.replace(x, batch=sizes[k % len(sizes)], samples=sizes[k % len(sizes)])
        for k, x in enumerate(steps(n=n))
    )


def uneven(*of_ranks: tuple[Step, ...], **more: Any) -> list[Finding]:
    ranks = [rank(q, steps=x, loaders=(loader(),), **more) for q, x in enumerate(of_ranks)]
    return of_kind(batches.rules(job(*ranks), lambda _: None), "uneven_batches")


def test_the_rank_with_another_batch_size_is_named() -> None:
    f = only(uneven(of_size(8), of_size(8), of_size(2)))
    assert (f.cause, f.severity, f.certainty) == ("size", "warning", "proved")
    assert (f.culprits, f.victims) == ((2,), (0, 1))
    assert (f.where[0].rank, f.where[0].line) == (2, 2)  # where its batches come from
    assert "4.0x" in f.cost


def test_a_rank_without_data_that_keeps_the_others_company_is_no_fault() -> None:
    """Its steps have a loss of zero: a batch of one, and no sleep or work, so that the others need not wait for it."""

    def shadow(zeros: int) -> tuple[Step, ...]:
        xs = of_size(1)
        return tuple(msgspec.structs.replace(x, loss=0.0 if k >= len(xs) - zeros else 1.0) for k, x in enumerate(xs))

    assert uneven(of_size(8), shadow(60)) == []
    assert [f.cause for f in uneven(of_size(8), shadow(1))] == ["size"]  # a loss may be zero now and then
    late = rank(1, steps=steps(80.0, "other", seed=1))
    idle = [msgspec.structs.replace(x, loss=0.0) for x in steps(wait_ms=80.0)]
    assert of_kind(speed.rules(job(rank(0, steps=tuple(idle)), late)), "straggler") == []
    assert of_kind(speed.rules(job(rank(0, steps=steps(wait_ms=80.0)), late)), "straggler") != []


def test_of_two_ranks_neither_has_the_wrong_batch_size() -> None:
    f = only(uneven(of_size(8), of_size(4)))
    assert (f.cause, f.culprits, f.victims) == ("size", (), (0, 1)) and {w.rank for w in f.where} == {0, 1}


def test_batch_sizes_alike_or_varying_or_not_known_are_no_fault() -> None:
    assert uneven(of_size(8), of_size(8)) == []
    assert uneven(of_size(8), of_size(*[8] * 19, 3)) == []  # the last batch of each epoch is a smaller one
    assert uneven(of_size(8, 5), of_size(6, 3)) == []  # by a budget of tokens
    assert uneven(of_size(8), of_size(4, n=20)) == []  # not yet a habit
    assert uneven(of_size(8), of_size(0)) == []  # not measured
    apart = msgspec.structs.replace(MODEL, synced_backwards=0)
    assert uneven(of_size(8), of_size(4), models=(apart,)) == []  # nothing is averaged


# -- buffers -----------------------------------------------------------------------------------------------

APART = msgspec.structs.replace(MODEL, broadcast_buffers=False)


def buffers(*values: float, model: Model = APART, at: tuple[int, ...] = (2, 4, 8, 16)) -> list[Finding]:
    ranks = [
        rank(q, models=(model,), samples=tuple(Sample("buffers", k, v, key=5) for k in at))
        for q, v in enumerate(values)
    ]
    return of_kind(parameters.rules(job(*ranks)), "replica_drift")


def test_buffers_that_differ_where_they_are_not_broadcast_are_said() -> None:
    f = only(buffers(1.0, 1.0, 3.0))
    assert (f.cause, f.severity, f.certainty, f.step) == ("buffers", "error", "proved", 2)
    assert (f.culprits, f.victims) == ((2,), (0, 1)) and "broadcast_buffers" in f.advice
    f = only(buffers(1.0, 3.0))
    assert (f.culprits, f.victims) == ((), (0, 1))  # neither of two can be called the odd one


def test_buffers_may_differ_by_their_batches_or_until_the_next_broadcast() -> None:
    assert buffers(1.0, 1.2) == []  # statistics of different batches of the same data
    assert buffers(1.0, 3.0, model=MODEL) == []  # broadcast before each forward
    assert buffers(1.0, 3.0, model=msgspec.structs.replace(APART, synced_backwards=0)) == []
    assert buffers(1.0, 3.0, at=()) == [] and buffers(1.0, 3.0, at=(2,)) == []  # not, or not often, looked at


@pytest.mark.parametrize("apart_at", [(16,), (2,), (2, 4)])
def test_buffers_that_differ_once_or_agree_again_are_no_drift(apart_at: tuple[int, ...]) -> None:
    ranks = [
        rank(
            q,
            models=(APART,),
            samples=tuple(Sample("buffers", k, 1.0 + 2 * q * (k in apart_at), key=5) for k in (2, 4, 8, 16)),
        )
        for q in (0, 1)
    ]
    assert of_kind(parameters.rules(job(*ranks)), "replica_drift") == []


def test_buffers_of_different_models_are_not_compared() -> None:
    ranks = [
        rank(q, models=(APART,), samples=tuple(Sample("buffers", k, 1.0 + q, key=q) for k in (2, 4))) for q in (0, 1)
    ]
    assert of_kind(parameters.rules(job(*ranks)), "replica_drift") == []


# -- waiting for data --------------------------------------------------------------------------------------


def input_bound(*of_ranks: tuple[Step, ...], **more: Any) -> list[Finding]:
    ranks = [rank(q, steps=x, loaders=(feeding(),)) for q, x in enumerate(of_ranks)]
    return of_kind(speed.rules(job(*ranks, **more)), "input_bound")


def feeding() -> Loader:
    return loader(workers=2, site=Site("/job/train.py", 31, "main"))


def test_a_job_whose_ranks_all_wait_for_data_is_input_bound() -> None:
    f = only(input_bound(steps(60.0, "data"), steps(60.0, "data", seed=1)))
    assert (f.kind, f.cause, f.severity, f.certainty) == ("input_bound", None, "info", "proved")
    assert (f.culprits, f.victims) == ((), (0, 1))
    assert {(w.rank, w.line) for w in f.where} == {(0, 31), (1, 31)}
    assert "48 %" in f.cost and "(now 2)" in f.advice


def test_data_that_comes_in_time_or_is_late_on_one_rank_only_is_not_input_bound() -> None:
    assert input_bound(steps(), steps(seed=1)) == []
    assert input_bound(steps(wait_ms=60.0), steps(60.0, "data", seed=1)) == []  # a straggler: the other has its data
    assert input_bound(steps(60.0, "data", n=20), steps(60.0, "data", n=20)) == []  # too few steps to tell
    assert input_bound(steps(60.0, "data"), ()) == []  # one rank's steps are not known
    assert input_bound(steps(60.0, "data"), steps(60.0, "data"), world_size=3) == []


def test_a_loop_that_waits_for_nobody_has_no_finding_at_all() -> None:
    """All the rules of this file at once, on an ordinary job: each has its input, and nothing to say."""
    ordinary: Snapshot = job(
        *(
            rank(
                q, steps=steps(seed=q), loaders=(feeding(),), device_bytes=40 * GIB, device_total_bytes=80 * GIB,
                samples=tuple(Sample(kind, k, 1.0, key=5) for kind in ("parameters", "buffers") for k in (2, 4, 8)),
            )
            for q in (0, 1)
        ),
        usual_step_s=0.1,
        gpus=tuple(msgspec.structs.replace(CARD, gpu=q, rank=q, pcie_width=16) for q in (0, 1)),
    )  # fmt: skip
    found = [*resources.rules(ordinary), *gpus.rules(ordinary), *stalls.rules(ordinary, build(ordinary))]
    found += [*parameters.rules(ordinary), *batches.rules(ordinary, lambda _: None), *speed.rules(ordinary)]
    assert found == []
