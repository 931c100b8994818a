"""unused_parameters: parameters without gradient, and a search for them that never finds any."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.engine import Diagnosis
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
from distdiag.diagnosis.rules import nonfinite, replica_drift, unused_parameters
from tests.diagnosis.made import MODEL, findings, job, of_kind, only, rank
from tests.diagnosis.made import steps as timed


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


SEARCHED = msgspec.structs.replace(
    MODEL, find_unused=True, site=Site("/job/train.py", 12, "build"), unused_checks=60, search_ms=2.0
)


TIMES = tuple(DdpTime(8 * k, 100.0, 30.0, 10.0) for k in range(1, 11))


def not_needed(*models: Model, usual_step_s: float | None = 0.1, times: tuple[DdpTime, ...] = TIMES) -> list[Finding]:
    ranks = [rank(q, models=(m,), ddp_times=times) for q, m in enumerate(models)]
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
    ranks = [
        rank(q, models=(msgspec.structs.replace(m, buckets=bucket),), ddp_times=TIMES)
        for q, m in enumerate((SEARCHED, slower))
    ]
    f = only(of_kind(found_in(job(*ranks, usual_step_s=0.1)), "unused_parameters"))
    assert "a step would take 2.0 to 13.0 % less" in f.cost


def test_a_search_set_by_a_library_is_info() -> None:
    f = only(not_needed(*[msgspec.structs.replace(SEARCHED, flag_of_library=True)] * 2))
    assert (f.cause, f.severity) == ("flag_not_needed", "info") and "ddp_find_unused_parameters" in f.advice


def test_a_search_that_costs_hardly_anything_is_info() -> None:
    f = only(not_needed(*[msgspec.structs.replace(SEARCHED, search_ms=0.05)] * 2))
    assert (f.cause, f.severity) == ("flag_not_needed", "info")
    assert "0.05 ms per step (0.05 % of it)" in f.cost


def test_a_search_that_found_unused_parameters_once_is_needed() -> None:
    hit = msgspec.structs.replace(SEARCHED, unused=(("head.weight", 40),), unused_hits=1, unused_step=9)
    assert of_kind(not_needed(SEARCHED, hit), "unused_parameters", "flag_not_needed") == []
    diagnosis = Diagnosis(source=lambda _: None)
    for second in range(20):  # a branch that is skipped at last
        models = [hit if second > 9 else SEARCHED] * 2
        ranks = [rank(q, models=(m,), ddp_times=TIMES, step=100 + second) for q, m in enumerate(models)]
        diagnosis.update(job(*ranks, usual_step_s=0.1, t_s=100.0 + second))
        assert bool(diagnosis.findings) is (second >= 1)
    assert only(diagnosis.findings).cleared_s is not None


@pytest.mark.parametrize(
    "change",
    [{"unused_checks": 39}, {"search_ms": None}, {"find_unused": False}],
    ids=["few checks", "not timed", "no flag"],
)
def test_a_search_with_few_checks_or_unknown_cost_is_not_reported(change: dict[str, Any]) -> None:
    assert not_needed(*[msgspec.structs.replace(SEARCHED, **change)] * 2) == []


def test_a_search_is_needed_for_all_that_is_known_where_no_rank_was_seen_to_use_all_parameters_itself() -> None:
    """After the backward each has the gradient of what any rank has used."""
    assert not_needed(SEARCHED, SEARCHED, times=TIMES[:9]) == []


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
    ("forward", "words"),
    [
        (
            "        return self.trunk(x), self.aux(x) if with_boxes else None\n",
            "they are used only `if with_boxes` (net.py:3)",
        ),
        ("        if with_boxes:\n            return self.aux(x)\n", "they are used only `if with_boxes` (net.py:3)"),
        (
            "        if not len(x):\n            return self.trunk(x)\n        return self.aux(x)\n",
            "`if not len(x)` (net.py:3) returns before they are used",
        ),
    ],
)
def test_the_condition_under_which_a_skipped_head_is_used_is_named(forward: str, words: str) -> None:
    text = f"class Net(Module):\n    def forward(self, x, with_boxes):\n{forward}"
    waits = Call(op="all_reduce", group="default_pg", seq=7, entered_s=90.0)
    m = msgspec.structs.replace(unused("aux.weight"), unused_site=Site("/job/net.py", 9, "main"))
    s = job(rank(0, blocked=waits, phase="backward"), rank(1, models=(m,)))

    def message(source: str) -> str:
        return only(findings(s, unused_parameters, source={"/job/net.py": source}.get)).message

    assert words in message(text)
    assert "used" not in message(text + "        return self.aux(x)\n"), "it is called elsewhere, too"
    assert "used" not in message("")


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


@pytest.mark.parametrize(
    ("values", "rate", "since", "found"),
    [
        ((1.5,) * 5, 0.1, 32, True),
        ((1.5,) * 5, 0.0, 32, True),
        ((1.5,) * 5, 0.0, 2, False),
        ((1.5,) * 5, None, 32, False),
        ((1.5, 1.6, 1.7, 1.8, 1.8), 0.1, 32, False),
        ((1.5, 1.6, 1.7, 1.8, 1.8), 0.0, 32, False),
        ((1.5,) * 3, 0.1, 32, False),
    ],
    ids=["the same", "rate 0", "warm-up from 0", "rate not known, or others step", "changed", "changed without a rate", "few"],
)  # fmt: skip
def test_parameters_that_no_step_changes_are_reported(
    values: tuple[float, ...], rate: float | None, since: int, found: bool
) -> None:
    at = range(since, since + 160, 32)
    rates = () if rate is None else tuple(Sample("learning_rate", k, rate) for k in at)
    samples = (*(Sample("parameters", k, v) for k, v in zip(at, values, strict=False)), *rates)
    of = found_in(job(*(rank(q, samples=samples) for q in range(2))))
    of = [f for f in of if f.cause == "not_updated"]
    assert bool(of) is found
    if found:
        assert f"the same after each of 5 steps that were compared, at a learning rate of {rate:g}" in of[0].message
        assert ("once per optimizer step" in of[0].advice) is (rate == 0)


@pytest.mark.parametrize(
    ("steps", "stale", "severity"),
    [((32, 64, 96, 128), 0, "info"), ((32, 64, 96, 128), 2, "warning"), ((32, 64, 96), 2, None)],
)
def test_parameters_with_gradients_that_no_optimizer_steps_are_reported(
    steps: tuple[int, ...], stale: int, severity: str | None
) -> None:
    left = tuple(Sample("not_stepped", k, 2.0, key=stale, name="head.weight, head.bias") for k in steps)
    left += (Sample("learning_rate", steps[-1], 0.1, site=Site("/job/fit.py", 69, "main")),)
    of = [f for f in found_in(job(rank(0, samples=left), rank(1, samples=left))) if f.cause == "not_updated"]
    assert [f.severity for f in of] == ([severity] if severity else [])
    if severity:
        assert (
            "2 parameters (head.weight, head.bias) of the module in DDP get gradients, and no optimizer steps them"
            in of[0].message
        )
        assert ("the optimizer has 2 that the module does not have" in of[0].message) is bool(stale)
        assert [(w.rank, w.line) for w in of[0].where] == [(0, 69), (1, 69)], "where the optimizer steps"


def test_parameters_that_the_optimizer_lacks_and_others_that_the_model_lacks_are_named_without_ddp() -> None:
    left = tuple(
        Sample("not_stepped", k, 6.0, key=5, name="embed.weight, norm.weight, norm.bias, head.weight")
        for k in (32, 64, 96, 128)
    )
    never = tuple(Sample("no_gradients", k, 5.0, key=40) for k in (32, 64, 96, 128))
    s = job(*(rank(q, models=(), samples=left + never) for q in range(2)))
    found = only([f for f in found_in(s) if f.kind == "unused_parameters"])
    assert (found.cause, found.severity) == ("not_updated", "warning")
    assert found.names[1:3] == ("norm.weight", "norm.bias") and "fully_shard" in str(found.advice)
    assert (
        "steps 5 parameters that the model does not have (any more), and 6 parameters of the model (embed.weight, norm.weight, norm.bias, head.weight and 2 more)"
        in found.message
    )


def test_modules_in_a_list_are_told_from_a_layer_that_the_optimizer_lacks() -> None:
    left = tuple(Sample("not_stepped", k, 6.0, key=1 << 32, name="Adapter.down.weight") for k in (32, 64, 96, 128))
    found = only([f for f in found_in(job(rank(0, samples=left), rank(1, samples=left))) if f.cause == "not_updated"])
    assert found.severity == "warning" and "does not have them among its own" in found.message
    assert (
        "6 parameters (Adapter.down.weight and 5 more) get gradients" in found.message
        and "nn.ModuleList" in found.advice
    )


def test_parameters_that_the_optimizer_of_another_rank_steps_are_trained() -> None:
    """ZeroRedundancyOptimizer steps each parameter on one rank, and broadcasts it."""

    def left(name: str) -> tuple[Sample, ...]:
        return tuple(Sample("not_stepped", k, 2.0, name=name) for k in (32, 64, 96, 128))

    assert found_in(job(rank(0, samples=left("stem.weight")), rank(1, samples=left("head.weight")))) == []
    assert found_in(job(rank(0, samples=left("stem.weight")), rank(1))) == []


@pytest.mark.parametrize(("steps", "found"), [((32, 64, 96, 128), True), ((32, 64, 96), False), ((2, 4, 8, 16), False)])
def test_an_optimizer_whose_parameters_have_no_gradients_is_reported(steps: tuple[int, ...], found: bool) -> None:
    bare = tuple(Sample("no_gradients", k, 4.0) for k in steps)
    of = [f for f in found_in(job(rank(0, samples=bare), rank(1, samples=bare))) if f.cause == "not_updated"]
    assert bool(of) is found
    if found:
        assert "none of its 4 parameters has a gradient when it steps" in of[0].message
        assert "zero_grad()` after the optimizer's step" in of[0].advice
    later = (*bare, Sample("parameters", 256, 1.0))
    assert not [f for f in found_in(job(rank(0, samples=later), rank(1, samples=later))) if f.cause == "not_updated"]


def lacking(share: float, *steps: int, gathers: str = "", n: int = 30) -> list[Finding]:
    """Return the findings of ranks without DDP, of whose 40 parameters `n` have had no gradient at these steps."""
    at = Site("/job/loss.py", 12, "gather", caller=Site("/job/loss.py", 30, "forward"))
    samples = tuple(Sample("no_gradients", k, float(n), key=40 | round(share * 1e6) << 32, name="8 x 3") for k in steps)
    calls = tuple(
        Call(op=op, group="default_pg", seq=2 * k + i, bytes=8192, site=at, entered_s=k * 0.1 + 0.05)
        for k in range(30, 61)
        for i, op in enumerate(gathers.split())
    )
    made = (rank(q, models=(), samples=samples, calls=calls, steps=timed()) for q in range(2))
    return findings(job(*made), unused_parameters)


@pytest.mark.parametrize(("share", "severity"), [(0.9, "warning"), (0.2, "info")])
def test_parameters_that_never_get_a_gradient_without_ddp_are_counted(share: float, severity: str) -> None:
    f = only(lacking(share, 32, 64, 96, 128))
    assert (f.cause, f.severity, f.certainty, f.victims) == ("never_used", severity, "suspected", (0, 1))
    words = f"30 of 40 parameters that the optimizer of ranks 0, 1 steps ({share * 100:.0f} % of their elements; the first: 8 x 3)"
    assert f.message == f"{words} have had no gradient at any of 4 sampled steps up to step 128"
    assert "torch.distributed.nn.functional.all_gather" in f.advice
    assert lacking(share, 32, 64, 96) == []
    assert lacking(share, 32, 64, 96, 128, n=0) == [], "all have one by now"
    assert only(lacking(share, 32, 64, 96, 128, n=40)).cause == "not_updated"


@pytest.mark.parametrize(
    ("gathers", "named"),
    [
        ("all_gather", True),
        ("all_gather_into_tensor all_reduce", True),
        ("all_gather reduce_scatter", False),
        ("all_reduce", False),
    ],
)
def test_an_all_gather_in_every_step_is_suspected_to_cut_the_graph(gathers: str, named: bool) -> None:
    """That of `torch.distributed.nn` has a backward pass, which is a reduce_scatter."""
    f = only(lacking(0.9, 32, 64, 96, 128, gathers=gathers))
    assert f.message.startswith("the all_gather at loss.py:12 in gather, in every step, passes no gradient on") is named


@pytest.mark.parametrize(
    ("never_called", "gathers", "words"),
    [
        ((), "", "their output does not reach the loss"),
        ((), "all_gather", "the loss; the all_gather at loss.py:12 in gather, in every step, passes no gradient on"),
        (("b.out_proj",), "all_gather", "the all_gather at loss.py:12"),  # called by its parent as a function
        (("b.out_proj", "b.query", "b"), "all_gather", ""),
        (None, "all_gather", ""),
    ],
)
def test_modules_that_are_called_and_never_trained_are_told_from_those_that_are_left_out(
    never_called: tuple[str, ...] | None, gathers: str, words: str
) -> None:
    lost = tuple((f"{name}.weight", 8) for name in ("b.out_proj", "b.query", "b"))
    m = msgspec.structs.replace(
        MODEL, find_unused=True, unused=lost, never_trained=lost, unused_hits=120, unused_step=120, unused_checks=120, never_called=never_called,
    )  # fmt: skip
    at = Site("/job/loss.py", 12, "gather")
    calls = tuple(
        Call(op=gathers, group="default_pg", seq=k, bytes=8192, site=at, entered_s=k * 0.1 + 0.05)
        for k in range(30, 61 if gathers else 30)
    )
    f = only(findings(job(*(rank(q, models=(m,), calls=calls, steps=timed()) for q in range(2))), unused_parameters))
    assert f.cause == "never_used" and words in f.message
    assert ("torch.distributed.nn.functional.all_gather" in f.advice) is bool(words)


@pytest.mark.parametrize(("ranks", "of_now"), [((0, 1), True), ((0,), False), ((), False)])
def test_parameters_that_ddp_refuses_after_a_conversion_have_gradients(ranks: tuple[int, ...], of_now: bool) -> None:
    site = Site("/job/net.py", 9, "main")
    m = msgspec.structs.replace(MODEL, unused=(("head.weight", 40), ("head.bias", 4)), unused_step=9, unused_site=site)
    lost = (Sample("hooks_lost", 9, 2.0, key=2, name="head.weight"),)
    s = job(*(rank(q, step=9, models=(m,), samples=lost if q in ranks else ()) for q in range(2)))
    f = only(of_kind(found_in(s), "unused_parameters"))
    assert ("lost DDP's hooks" in f.message and "deepcopy" in (f.advice or "")) is of_now
    assert ("got no gradient" in f.message) is not of_now
