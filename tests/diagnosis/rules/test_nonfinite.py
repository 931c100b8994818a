"""nonfinite: values that are not finite, by the rank that had them first."""

from __future__ import annotations

import msgspec

from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import (
    Sample,
    Snapshot,
)
from distdiag.diagnosis.rules import nonfinite, replica_drift, unused_parameters
from tests.diagnosis.made import LOOP, findings, job, only, rank


def found_in(s: Snapshot) -> list[Finding]:
    return findings(s, unused_parameters, replica_drift, nonfinite)


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
    assert (f.severity, f.culprits) == ("info", (1,)) and "averages nothing with other ranks" in f.message
    other = rank(0, samples=(Sample("nonfinite_loss", 20, float("nan")),))
    f = only([f for f in found_in(job(other, mine)) if f.kind == "nonfinite"])
    assert (f.severity, f.culprits) == ("error", (1,))


def test_an_infinite_loss_with_finite_gradients_is_info() -> None:
    log_of_zero = rank(1, samples=(Sample("infinite_loss", 120, float("-inf"), site=LOOP),))
    f = only([f for f in found_in(job(rank(0), log_of_zero)) if f.kind == "nonfinite"])
    assert (f.severity, f.cause, f.culprits, f.step) == ("info", "loss", (1,), 120)
    assert "loss is -inf on rank 1 since step 120" in f.message
    nan = rank(0, samples=(Sample("nonfinite_loss", 200, float("nan")),))
    f = only([f for f in found_in(job(nan, log_of_zero)) if f.kind == "nonfinite"])
    assert (f.severity, f.culprits) == ("error", (0,))


def test_a_logged_value_that_turns_nan_and_stays_so_is_reported() -> None:
    nan, finite = float("nan"), tuple((k, 1.0 / k) for k in range(1, 13))
    turned = (*finite, *((k, nan) for k in range(13, 20)))

    def found(name: str, *of_ranks: tuple[tuple[int, float], ...]) -> list[Finding]:
        return findings(job(*(rank(q, logged={name: x}) for q, x in enumerate(of_ranks))), nonfinite)

    f = only(found("loss", finite, turned))
    assert (f.cause, f.culprits, f.step, f.severity) == ("logged", (1,), 13, "warning")
    assert only(found("reward", finite, turned)).severity == "info"
    assert only(found("loss", turned, turned)).victims == (0, 1)
    assert found("loss", finite, finite) == []
    sometimes = tuple((k, 1.0 if k % 8 == 0 else nan) for k in range(1, 30))
    assert found("loss", sometimes, sometimes) == [], "it is logged in every eighth step only"


def test_replicas_that_have_drifted_apart_are_mended_first() -> None:
    s = job(*(rank(q, samples=(Sample("nonfinite_loss", 120 + q, float("nan")),)) for q in range(2)))

    def advice(*reported: Finding) -> str:
        return str(next(f.advice for f in nonfinite.evaluate(Facts(s, reported=reported)) if isinstance(f, Finding)))

    drift = Finding(kind="replica_drift", message="", step=2)
    assert advice(drift).startswith("first mend what lets the replicas drift apart since step 2")
    assert "replicas" not in advice() + advice(msgspec.structs.replace(drift, step=160))
