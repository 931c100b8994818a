"""Rules on parameters and buffers: unused, drifting, not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    Buckets,
    Call,
    DdpTime,
    Model,
    Sample,
    Site,
    Snapshot,
)
from distdiag.diagnosis.rules import group_misuse, nonfinite, replica_drift, unused_parameters
from tests.diagnosis.made import LOOP, MODEL, findings, job, loader, of_kind, only, rank


def found_in(s: Snapshot) -> list[Finding]:
    return findings(s, unused_parameters, replica_drift, nonfinite)


def test_unused_parameters_are_named_and_are_errors_only_where_ddp_will_refuse() -> None:
    unused = msgspec.structs.replace(
        MODEL, unused=(("head.weight", 40), ("head.bias", 4)), unused_hits=3, unused_step=9
    )
    f = only(
        [
            f
            for f in found_in(job(rank(0, models=(unused,)), rank(1, models=(unused,))))
            if f.kind == "unused_parameters"
        ]
    )
    assert (f.cause, f.severity, f.names) == ("never_used", "error", ("head.weight", "head.bias"))


@pytest.mark.parametrize(
    ("never", "checks", "of_library", "severity"),
    [
        ((("head.weight", 40),), 120, False, "warning"),
        ((("head.weight", 40),), 120, True, "info"),  # a library set the flag, perhaps without knowing the model
        ((("head.weight", 40),), 50, False, "info"),
        ((("head.weight", 40),), 10, False, None),
        ((), 120, False, None),  # every parameter is used occasionally: the purpose of the flag
    ],
)
def test_expected_unused_parameters_are_reported_if_never_used(
    never: tuple[tuple[str, int], ...], checks: int, of_library: bool, severity: str | None
) -> None:
    m = msgspec.structs.replace(
        MODEL, find_unused=True, flag_of_library=of_library, unused=(("head.weight", 40), ("body.bias", 4)),
        unused_hits=3, unused_step=9, unused_checks=checks, never_trained=never,
    )  # fmt: skip
    other = msgspec.structs.replace(
        m, unused=(("body.weight", 9), ("head.weight", 40))
    )  # another branch at its last check
    found = [f for f in found_in(job(rank(0, models=(m,)), rank(1, models=(other,)))) if f.kind == "unused_parameters"]
    if severity is None:
        assert found == []
    else:
        f = only(found)
        assert (f.cause, f.severity, f.names) == ("never_used", severity, ("head.weight",))
        assert f"({checks} checks)" in f.message


def drifting(
    values: Callable[[int, int], float],
    reduced: float | None = None,
    averaged: float | None = None,
    synced: Callable[[int, int], int] = lambda q, k: 0,
    **more: Any,
) -> list[Finding]:
    def samples(q: int) -> tuple[Sample, ...]:
        shares = () if reduced is None else tuple(Sample("reduced", k, reduced) for k in (2, 4, 8, 16))
        shares += () if averaged is None else (Sample("averaged", 8, averaged),)
        return (*(Sample("parameters", k, values(q, k), key=5 | synced(q, k) << 32) for k in (2, 4, 8, 16)), *shares)

    ranks = [rank(q, samples=samples(q), **more) for q in range(3)]
    return [f for f in found_in(job(*ranks)) if f.kind == "replica_drift"]


def test_replicas_that_differ_are_reported() -> None:
    assert drifting(lambda q, k: 1.0 + k) == []
    assert drifting(lambda q, k: 1.0 + k + 1e-9 * q) == []
    f = only(drifting(lambda q, k: 1.0 + k + 0.1 * q * k))
    assert f.cause == "gradients_not_synced" and f.step == 2
    assert only(drifting(lambda q, k: 1.0 + (0.5 if q == 2 else 0.0))).culprits == (2,)


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ((1.0, 1.0, 0.07, 0.07), True),  # a bucket made before more parameters were unfrozen
        ((1.0, 1.0, 0.0, 0.0), False),  # averaged periodically, after a warm-up
        ((1.0, 1.0, 0.07, 0.5), False),
        ((0.07, 0.07, 0.07, 0.07), False),  # most parameters are the rank's own, by design
    ],
)
def test_parameters_trained_later_without_averaging_are_reported(shares: tuple[float, ...], found: bool) -> None:
    def samples(q: int) -> tuple[Sample, ...]:
        values = (1.0, 1.1, 1.2 + 0.1 * q, 1.3 + 0.2 * q)
        by_step = zip((32, 64, 96, 128), values, shares, strict=True)
        return tuple(
            x for k, v, share in by_step for x in (Sample("parameters", k, v, key=5), Sample("reduced", k, share))
        )

    ranks = [rank(q, step=130, models=(), samples=samples(q)) for q in range(2)]
    drift = [f for f in found_in(job(*ranks)) if f.kind == "replica_drift"]
    assert bool(drift) is found
    if found:
        f = only(drift)
        assert (f.cause, f.certainty, f.step) == ("gradients_not_synced", "suspected", 96)
        assert "not those of the parameters that have been trained since" in f.message


def with_rates(values: Callable[[int, int], float], rates: Callable[[int, int], float], **more: Any) -> Finding:
    """Return the drift of three ranks whose learning rates were sampled with their checksums."""
    model = msgspec.structs.replace(MODEL, **more)
    steps = (2, 4, 8, 16)

    def samples(q: int) -> tuple[Sample, ...]:
        return tuple(
            x
            for k in steps
            for x in (Sample("parameters", k, values(q, k), key=5), Sample("learning_rate", k, rates(q, k)))
        )

    ranks = [rank(q, step=16, models=(model,), samples=samples(q)) for q in range(3)]
    return only(of_kind(found_in(job(*ranks)), "replica_drift"))


def test_learning_rates_that_differ_are_the_reason() -> None:
    f = with_rates(lambda q, k: 1.0 + 0.1 * (q == 2 and k > 4), lambda q, k: 1e-4 if q == 2 and k > 4 else 1e-3)
    assert f.culprits == (2,) and "0.001 on ranks 0, 1, 0.0001 on rank 2" in f.message and "scheduler" in f.advice
    # gradients are accumulated over two backwards: only one of them is synchronised
    f = with_rates(lambda q, k: 1.0 + 0.1 * q * k, lambda q, k: 0.1 * (q + 1), forwards=32, synced_backwards=16)
    assert f.culprits == () and "learning rates differ" in f.message


def test_learning_rates_that_agree_or_gradients_that_are_not_averaged_have_other_reasons() -> None:
    f = with_rates(lambda q, k: 1.0 + 0.1 * (q == 2 and k > 4), lambda q, k: 1e-3)
    assert "learning rate" not in f.message
    f = with_rates(lambda q, k: 1.0 + 0.1 * q, lambda q, k: 0.1 * (q + 1), forwards=32, synced_backwards=0)
    assert "their gradients are not averaged" in f.message


def test_weights_loaded_into_wrapped_replicas_are_not_unsynchronised_gradients() -> None:
    """Averaged gradients keep the distance; unsynchronised ones increase it at least like the square root of the steps."""

    def cause(values: Callable[[int, int], float], synced: int = 16) -> str | None:
        return with_rates(values, lambda q, k: 1e-3, forwards=16, synced_backwards=synced).cause

    assert cause(lambda q, k: 1.0 + 0.01 * k + 0.1 * (q == 1)) == "different_init"
    assert cause(lambda q, k: 1.0 + 0.01 * k + 0.1 * (q == 1), synced=0) == "gradients_not_synced"
    for power in (0.5, 1.0):
        assert cause(lambda q, k, power=power: 1.0 + 0.01 * q * k**power) == "gradients_not_synced"
    f = with_rates(lambda q, k: 1.0 + (q == 1), lambda q, k: 1e-3, forwards=16, synced_backwards=16)
    assert (
        f.culprits == (1,) and "began with different values" in f.message and "before the model is wrapped" in f.advice
    )


def test_replicas_averaged_periodically_may_differ_in_between() -> None:
    assert drifting(lambda q, k: 1.0 + 0.1 * q * k, averaged=1.0) == []
    assert drifting(lambda q, k: 1.0 + 0.1 * q * k, averaged=0.01) != []  # an accuracy was reduced, not parameters


def test_replicas_are_compared_at_the_same_point_of_the_job() -> None:
    def differ(q: int, k: int) -> float:
        return 1.0 + 0.1 * q * k

    assert drifting(differ, synced=lambda q, k: k) and drifting(differ, synced=lambda q, k: k + (q == 1))
    # each trained separately before, for different numbers of steps
    assert drifting(differ, synced=lambda q, k: k + 10 * q) == []


def test_independent_models_may_differ() -> None:
    assert drifting(lambda q, k: float(q), models=()) == []


def test_different_init_needs_a_model_that_is_averaged_as_a_whole() -> None:
    assert only(drifting(lambda q, k: float(q), 1.0, models=())).cause == "different_init"
    later = only(drifting(lambda q, k: float(q == 1 and k > 4), 1.0, models=()))  # equal at first: one skips a step
    assert (later.cause, later.culprits, later.step) == ("gradients_not_synced", (1,), 8)
    assert "updates its parameters in the same way" in later.message
    assert drifting(lambda q, k: float(q), 0.6, models=()) == []  # a rank's own experts next to shared parameters
    assert drifting(lambda q, k: float(q), 1.7, models=()) == []  # activations of a model split over the ranks


def test_the_rank_with_the_first_nonfinite_loss_is_named() -> None:
    s = job(
        rank(0, samples=(Sample("nonfinite_gradient", 12, float("nan")), Sample("nonfinite_loss", 13, float("nan")))),
        rank(1, samples=(Sample("nonfinite_loss", 12, float("inf"), site=LOOP),)),
    )
    f = only([f for f in found_in(s) if f.kind == "nonfinite"])
    assert (f.cause, f.culprits, f.step) == ("loss", (1,), 12) and "inf" in f.message
    both = job(*(rank(q, samples=(Sample("nonfinite_loss", 12, float("nan")),)) for q in range(2)))
    f = only([f for f in found_in(both) if f.kind == "nonfinite"])
    assert (f.culprits, f.victims) == ((), (0, 1))  # a collective in forward, or a too high rate: no rank was first


def test_a_nonfinite_loss_in_a_trial_of_one_rank_is_info() -> None:
    """It is an error once others have it, too: then the ranks train one model after all."""
    mine = rank(1, samples=(Sample("nonfinite_loss", 12, float("nan"), alone=True),))
    f = only([f for f in found_in(job(rank(0), mine)) if f.kind == "nonfinite"])
    assert (f.severity, f.culprits) == ("info", (1,)) and "trains alone" in f.message
    other = rank(0, samples=(Sample("nonfinite_loss", 20, float("nan")),))
    f = only([f for f in found_in(job(other, mine)) if f.kind == "nonfinite"])
    assert (f.severity, f.culprits) == ("error", (1,))


SEARCHED = msgspec.structs.replace(
    MODEL, find_unused=True, site=Site("/job/train.py", 12, "build"), unused_checks=60, search_ms=2.0
)


def not_needed(*models: Model, usual_step_s: float | None = 0.1) -> list[Finding]:
    ranks = [rank(q, models=(m,)) for q, m in enumerate(models)]
    return of_kind(found_in(job(*ranks, usual_step_s=usual_step_s)), "unused_parameters")


def test_a_search_that_never_found_unused_parameters_is_reported_with_its_cost() -> None:
    f = only(not_needed(SEARCHED, SEARCHED))
    assert (f.cause, f.severity, f.certainty) == ("flag_not_needed", "warning", "suspected")
    assert (f.culprits, f.victims, f.names) == ((), (0, 1), ())  # caused by the script, not by a rank
    assert [(w.rank, w.file, w.line) for w in f.where] == [(0, "/job/train.py", 12), (1, "/job/train.py", 12)]
    assert "2.0 ms per step (2 % of it)" in f.cost


def test_the_gain_without_a_search_is_between_the_search_and_all_exposed_communication() -> None:
    slower = msgspec.structs.replace(SEARCHED, search_ms=3.0)
    assert "without the flag, a step would take at least 2.0 % less" in only(not_needed(SEARCHED, slower)).cost
    bucket = Buckets(bytes=1 << 20, buckets=1, bucket_bytes=(1 << 20,))
    times = tuple(DdpTime(8 * k, 100.0, 30.0, 10.0) for k in range(1, 5))
    ranks = [
        rank(q, models=(msgspec.structs.replace(m, buckets=bucket),), ddp_times=times)
        for q, m in enumerate((SEARCHED, slower))
    ]
    f = only(of_kind(found_in(job(*ranks, usual_step_s=0.1)), "unused_parameters"))
    assert "a step would take 2.0 to 13.0 % less" in f.cost


def test_a_search_set_by_a_library_is_info() -> None:
    f = only(not_needed(*[msgspec.structs.replace(SEARCHED, flag_of_library=True)] * 2))
    assert (f.cause, f.severity) == ("flag_not_needed", "info") and "ddp_find_unused_parameters" in f.advice


def test_a_search_that_found_unused_parameters_once_is_needed() -> None:
    hit = msgspec.structs.replace(SEARCHED, unused=(("head.weight", 40),), unused_hits=1, unused_step=9)
    assert of_kind(not_needed(SEARCHED, hit), "unused_parameters", "flag_not_needed") == []


@pytest.mark.parametrize(
    "change",
    [{"unused_checks": 39}, {"search_ms": None}, {"search_ms": 0.05}, {"find_unused": False}],
    ids=["few checks", "not timed", "costs nothing", "no flag"],
)
def test_a_search_with_few_checks_or_low_cost_is_not_reported(change: dict[str, Any]) -> None:
    assert not_needed(*[msgspec.structs.replace(SEARCHED, **change)] * 2) == []


def test_the_cost_of_a_search_needs_the_step_time_and_all_ranks() -> None:
    for unknown in ({"unused_checks": 3}, {"search_ms": None}):
        assert not_needed(SEARCHED, msgspec.structs.replace(SEARCHED, **unknown)) == []
    assert not_needed(SEARCHED, SEARCHED, usual_step_s=None) == []
    s = job(rank(0, models=(SEARCHED,)), rank(1, models=(SEARCHED,)), usual_step_s=0.1, world_size=3)
    assert of_kind(found_in(s), "unused_parameters") == []  # the third has not reported


def unused(*names: str) -> Model:
    return msgspec.structs.replace(MODEL, unused=tuple((n, 10) for n in names), unused_hits=3, unused_step=9)


def test_a_branch_skipped_by_one_rank_differs_from_one_skipped_by_all() -> None:
    waits = Call(op="all_reduce", group="default_pg", seq=7, entered_s=90.0)
    s = job(rank(0), rank(1, models=(unused("aux.weight", "aux.bias"),)), rank(2, blocked=waits, phase="backward"))
    f = only(of_kind(found_in(s), "unused_parameters"))
    assert (f.cause, f.severity, f.certainty) == ("differs_between_ranks", "error", "proved")
    assert (f.culprits, f.victims, f.names) == ((1,), (0, 2), ("aux.weight", "aux.bias"))
    assert "(20 elements) got no gradient on rank 1" in f.message


@pytest.mark.parametrize(
    "forward",
    [
        "        return self.trunk(x), self.aux(x) if with_boxes else None\n",
        "        if with_boxes:\n            return self.aux(x)\n",
    ],
)
def test_the_condition_under_which_a_skipped_head_is_used_is_named(forward: str) -> None:
    text = f"class Net(Module):\n    def forward(self, x, with_boxes):\n{forward}"
    waits = Call(op="all_reduce", group="default_pg", seq=7, entered_s=90.0)
    m = msgspec.structs.replace(unused("aux.weight"), unused_site=Site("/job/net.py", 9, "main"))
    s = job(rank(0, blocked=waits, phase="backward"), rank(1, models=(m,)))

    def message(source: str) -> str:
        return only(findings(s, unused_parameters, source={"/job/net.py": source}.get)).message

    assert "they are used only `if with_boxes` (net.py:3)" in message(text)
    assert "used only" not in message(text + "        return self.aux(x)\n"), "it is called elsewhere, too"
    assert "used only" not in message("")


def test_ranks_that_skip_different_branches_are_all_culprits() -> None:
    s = job(rank(0, models=(unused("left.weight"),)), rank(1, models=(unused("right.weight"),)))
    f = only(of_kind(found_in(s), "unused_parameters"))
    assert (f.cause, f.culprits, f.victims) == ("differs_between_ranks", (), (0, 1))
    assert f.names == ("left.weight", "right.weight")


def test_a_difference_without_consequences_is_no_error() -> None:
    """The two ranks may have been checked at different steps."""
    f = only(of_kind(found_in(job(rank(0), rank(1, models=(unused("aux.weight"),)))), "unused_parameters"))
    assert (f.cause, f.severity) == ("differs_between_ranks", "info")


def test_an_unchecked_rank_does_not_differ() -> None:
    unknown = msgspec.structs.replace(MODEL, unused_checks=0)
    for s in (
        job(rank(0, models=(unknown,)), rank(1, models=(unused("aux.weight"),))),
        job(rank(0, models=()), rank(1, models=(unused("aux.weight"),))),
    ):
        assert only(of_kind(found_in(s), "unused_parameters")).cause == "never_used"
    assert of_kind(found_in(job(rank(0), rank(1))), "unused_parameters") == []


APART = msgspec.structs.replace(MODEL, broadcast_buffers=False)


def buffers(*values: float, model: Model = APART, at: tuple[int, ...] = (2, 4, 8, 16)) -> list[Finding]:
    ranks = [
        rank(q, models=(model,), samples=tuple(Sample("buffers", k, v, key=5) for k in at))
        for q, v in enumerate(values)
    ]
    return of_kind(found_in(job(*ranks)), "replica_drift")


def test_buffers_that_differ_without_broadcast_are_reported() -> None:
    f = only(buffers(1.0, 1.0, 3.0))
    assert (f.cause, f.severity, f.certainty, f.step) == ("buffers", "error", "proved", 2)
    assert (f.culprits, f.victims) == ((2,), (0, 1)) and "broadcast_buffers" in f.advice
    f = only(buffers(1.0, 3.0))
    assert (f.culprits, f.victims) == ((), (0, 1))  # with two ranks, neither is the minority


def test_buffers_may_differ_by_their_batches_or_until_the_next_broadcast() -> None:
    assert buffers(1.0, 1.2) == []  # statistics of different batches of the same data
    assert buffers(1.0, 3.0, model=MODEL) == []  # broadcast before each forward
    assert buffers(1.0, 3.0, model=msgspec.structs.replace(APART, synced_backwards=0)) == []
    assert buffers(1.0, 3.0, at=()) == [] and buffers(1.0, 3.0, at=(2,)) == []  # not sampled, or only once


@pytest.mark.parametrize("apart_at", [(16,), (2,), (2, 4)])
def test_buffers_that_differ_only_temporarily_are_no_drift(apart_at: tuple[int, ...]) -> None:
    ranks = [
        rank(
            q,
            models=(APART,),
            samples=tuple(Sample("buffers", k, 1.0 + 2 * q * (k in apart_at), key=5) for k in (2, 4, 8, 16)),
        )
        for q in (0, 1)
    ]
    assert of_kind(found_in(job(*ranks)), "replica_drift") == []


def test_buffers_of_different_models_are_not_compared() -> None:
    ranks = [
        rank(q, models=(APART,), samples=tuple(Sample("buffers", k, 1.0 + q, key=q) for k in (2, 4))) for q in (0, 1)
    ]
    assert of_kind(found_in(job(*ranks)), "replica_drift") == []


def never_averaged(calls: tuple[Call, ...] = (), **loaded: Any) -> list[Finding]:
    x = loader(**{"iterations_started": 2, "distributed_sampler": True, **loaded})
    ranks = []
    for q in (0, 1):
        samples = tuple(Sample("parameters", k, 1.0 + q * k, key=5) for k in (2, 4, 8, 16, 32))
        ranks.append(rank(q, models=(), samples=samples, loaders=(x,), calls=calls))
    return of_kind(found_in(job(*ranks)), "replica_drift")


def test_ranks_that_split_data_and_average_nothing_are_reported() -> None:
    f = only(never_averaged())
    assert f.cause == "gradients_not_synced" and "no DDP" in f.message
    metric, weights = (Call(op="all_reduce", group="default_pg", seq=1, bytes=n) for n in (8, 1 << 20))
    assert never_averaged((metric,)) != []
    assert never_averaged((weights,)) == []
    assert never_averaged(distributed_sampler=False) == []
    assert never_averaged(iterations_started=1) == []


def test_a_call_by_a_non_member_is_reported_with_its_line() -> None:
    outside = Sample("not_a_member", 3, 0.0, name="all_reduce", site=LOOP)
    f = only(findings(job(rank(0), rank(1, samples=(outside,))), group_misuse))
    assert (f.kind, f.cause, f.culprits) == ("group_misuse", "not_a_member", (1,))
    assert "all_reduce" in f.message and f.where[0].line == LOOP.line
    harmless = msgspec.structs.replace(outside, name="barrier")
    assert findings(job(rank(0), rank(1, samples=(harmless,))), group_misuse) == []


def test_unfrozen_parameters_whose_gradients_may_be_reduced_by_hand_are_no_drift() -> None:
    sample = Sample(kind="unfrozen", step=9, value=2.0, name="body.weight")
    reduced = Sample(kind="reduced", step=9, value=0.5)

    def of(*samples: Sample) -> list[Finding]:
        return findings(job(rank(0, samples=samples), rank(1, samples=samples)), replica_drift)

    assert only(of(sample)).names == ("body.weight",)
    assert of(sample, reduced) == []
