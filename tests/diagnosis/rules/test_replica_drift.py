"""replica_drift: parameters and buffers that differ between replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.comparison import vetoed
from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import (
    Buckets,
    Call,
    Group,
    Model,
    RankState,
    Sample,
    Site,
    Snapshot,
)
from distdiag.diagnosis.rules import nonfinite, replica_drift, unused_parameters
from distdiag.diagnosis.training_data import NOT_ONE_MODEL
from tests.diagnosis.made import MODEL, findings, job, loader, of_kind, only, rank
from tests.diagnosis.made import steps as made_steps


def found_in(s: Snapshot) -> list[Finding]:
    return findings(s, unused_parameters, replica_drift, nonfinite)


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
    assert f.cause == "update" and f.step == 2 and "not averaged" not in f.message
    assert "optimizer state" in f.advice, "DDP averages in every step: the updates differ"
    assert only(drifting(lambda q, k: 1.0 + (0.5 if q == 2 else 0.0))).culprits == (2,)
    f = only(drifting(lambda q, k: math.nan if k == 16 and q else 1.0 + k + 0.1 * q * k))
    assert "differ by 1.6 at step 8" in f.message, "not the distance of NaN to a number"


@pytest.mark.parametrize(
    ("ranks", "more", "words"),
    [
        (3, 1, "rank 1 were written more often than those of ranks 0, 2"),
        (3, -2, "rank 1 were written less often than those of ranks 0, 2"),
        (2, 1, "rank 1 were written more often than those of rank 0"),
        (3, 0, "those of rank 1 changed in another way than the others"),
    ],
)
def test_parameters_that_one_rank_writes_between_two_steps_are_no_update(ranks: int, more: int, words: str) -> None:
    """Weights that are put in for a validation by one rank, and stay; or a step that it skips."""

    def samples(q: int) -> tuple[Sample, ...]:
        odd = q == 1
        values = [Sample("parameters", k, k + (0.1 * k if odd and k > 64 else 0.0), key=5) for k in (32, 64, 96, 128)]
        # before: swapped and put back
        return (
            *values,
            *(Sample("learning_rate", k, 0.1, key=2 * k + odd * (6 + more * (k > 64))) for k in (32, 64, 96, 128)),
        )

    f = only(of_kind(found_in(job(*(rank(q, samples=samples(q)) for q in range(ranks)))), "replica_drift"))
    assert words in f.message and f.cause == "update" and f.where == ()
    assert ("put the trained ones back" in f.advice) is (more > 0 and ranks > 2)


def test_the_wrapped_module_that_trains_without_ddp_is_named() -> None:
    """Two modules in DDP; the discriminator is called through `.module`."""
    made = Site("/job/gan.py", 14, "__init__")
    generator = Model(name="Generator", group="default_pg", site=made, elements=900, forwards=16, synced_backwards=16)
    discriminator = Model(
        name="Discriminator", group="default_pg", site=made, elements=8449, forwards=0, synced_backwards=0
    )
    f = only(drifting(lambda q, k: 1.0 + 0.1 * q * k, models=(generator, discriminator)))
    assert "DDP has averaged no backward pass of Discriminator of 8,449 elements, wrapped at gan.py:14" in f.message
    assert "Generator" not in f.message


def test_an_accumulation_that_averages_an_early_backward_pass_is_suspected() -> None:
    """The counts of a correct accumulation are the same; the replicas tell that something stays local."""

    def drift(forwards: int) -> Finding:
        model = Model(group="default_pg", forwards=forwards, synced_backwards=100)
        return only(drifting(lambda q, k: 1.0 + (0.1 * q * k if k > 4 else 0.0), models=(model,)))

    assert "one of several backward passes per step" in drift(400).message
    assert drift(400).advice.startswith("leave `no_sync()` for the last backward pass")
    assert drift(120).message.count("backward pass") == 0


@pytest.mark.parametrize(("synced", "some"), [(80, True), (0, False), (96, False)])
def test_averaging_in_some_steps_is_worded_apart_from_averaging_in_none(synced: int, some: bool) -> None:
    """The last accumulation of an epoch is cut short, inside `no_sync()`."""
    model = Model(group="default_pg", forwards=352, synced_backwards=synced)
    f = only(drifting(lambda q, k: 1.0 + (0.1 * q * k if k > 4 else 0.0), models=(model,), step=96))
    assert ("before some of the optimizer steps only: 80 backward passes in 96 steps" in f.message) is some
    assert ("cuts an accumulation short" in f.advice) is some
    assert f.cause == "gradients_not_synced"


def test_a_module_that_ddp_runs_and_never_averages_is_not_said_to_be_called_without_it() -> None:
    """The condition that is to end `no_sync()` is never true."""
    model = Model(group="default_pg", forwards=400, synced_backwards=0)
    f = only(drifting(lambda q, k: 1.0 + 0.1 * q * k, models=(model,), step=100))
    assert "DDP's forward runs, but no backward pass averages" in f.message
    assert "no_sync" in f.advice and "model.module" not in f.advice


def suspected(ranks: list[RankState], text: str) -> list[int | None]:
    """Return since when these ranks drift; each finding must suspect gradients that are not averaged, and say this."""
    drift = [f for f in found_in(job(*ranks)) if f.kind == "replica_drift"]
    assert all((f.cause, f.certainty) == ("gradients_not_synced", "suspected") and text in f.message for f in drift)
    return [f.step for f in drift]


@pytest.mark.parametrize(
    ("op", "n_bytes", "found"),
    [
        ("all_reduce", 8, True),  # a metric
        ("all_to_all", 8192, False),  # experts or tables of the ranks' own
        ("all_reduce", 8192, False),  # averaged by hand
        ("broadcast", 8192, True),
    ],
)
def test_trained_parameters_that_no_ddp_module_has_are_reported(op: str, n_bytes: int, found: bool) -> None:
    """The loss has weights, and only the model is wrapped."""

    def samples(q: int) -> tuple[Sample, ...]:
        steps = (32, 64, 96)
        head = (Sample("outside_ddp", k, 1.0 + 0.1 * q * k, key=7, name="1 parameter (20 x 32)") for k in steps)
        return (*(Sample("parameters", k, 1.0 + k, key=5) for k in steps), *head)

    call = Call(group="default_pg", seq=90, op=op, bytes=n_bytes)
    ranks = [rank(q, step=100, models=(MODEL,), samples=samples(q), calls=(call,)) for q in range(2)]
    text = "an optimizer steps 1 parameter (20 x 32) that no DDP module had when it was built"
    assert suspected(ranks, text) == ([32] if found else [])


@pytest.mark.parametrize(("models", "cause"), [((), "gradients_not_synced"), ((MODEL,), "update")])
@pytest.mark.parametrize("local", [True, False])
def test_averaged_gradients_that_the_optimizer_does_not_step_with_are_the_reason(
    models: tuple[Model, ...], cause: str, local: bool
) -> None:
    """A bucket that is reduced and never copied back."""

    def samples(q: int) -> tuple[Sample, ...]:
        found = (
            (
                Sample("parameters", k, 1.0 + 0.1 * q * k, key=5),
                Sample("reduced", k, 1.0),
                Sample("gradients", k, 0.5 + 0.01 * q * local),
            )
            for k in (2, 4, 8, 16)
        )
        return sum(found, ())

    f = only(of_kind(found_in(job(*(rank(q, models=models, samples=samples(q)) for q in range(2)))), "replica_drift"))
    assert f.cause == (cause if local else "update")
    assert ("those with which the optimizer steps differ" in f.message and "p.grad.copy_" in (f.advice or "")) is local


@pytest.mark.parametrize("hook", [None, "powerSGD_hook"])
def test_gradients_that_ddp_has_averaged_are_changed_before_the_optimizers_step(hook: str | None) -> None:
    """The scale of a GradScaler that one rank alone has loaded; its step is too short to be sampled."""
    model = msgspec.structs.replace(MODEL, buckets=Buckets(bytes=4096, buckets=1, comm_hook=hook))
    line = Site("/job/amp.py", 47, "train_step")

    def samples(q: int) -> tuple[Sample, ...]:
        of = (
            (
                Sample("parameters", k, 1.0 + 0.1 * q * k, key=5), Sample("gradients", k, 0.2 + 1.4 * q),
                Sample("learning_rate", k, 0.1, key=5, site=line),
            )
            for k in (2, 4, 8, 16)
        )  # fmt: skip
        return sum(of, ())

    ranks = (rank(q, models=(model,), samples=samples(q)) for q in range(2))
    f = only(of_kind(found_in(job(*ranks)), "replica_drift"))
    assert f.cause == "update" and ("GradScaler" in str(f.advice)) is (hook is None)
    assert ("p.grad.copy_" in str(f.advice)) is (hook is not None), "the hook may average nothing"
    assert hook or {(w.file, w.line) for w in f.where} == {(line.file, line.line)}


def test_shards_that_the_optimizers_step_are_not_said_to_be_the_model() -> None:
    """ZeRO-1 by hand: all gradients are reduced, and each rank steps a quarter of them."""

    def samples(q: int) -> tuple[Sample, ...]:
        of = ((Sample("parameters", k, 1.0 + q + 0.1 * k, key=5), Sample("reduced", k, 4.0)) for k in (2, 4, 8, 16))
        return sum(of, ())

    s = job(*(rank(q, step=16, models=(), samples=samples(q)) for q in range(4)))
    (drift,) = (x for x in replica_drift.evaluate(Facts(s)) if isinstance(x, Abstained) and x.cause is None)
    assert drift.checked and drift.reason.startswith("the parameters that the ranks' optimizers step differ, as shards")
    veto = vetoed(NOT_ONE_MODEL, s)
    assert veto is not None and not veto.checked and "more elements are reduced than" in veto.reason


@pytest.mark.parametrize("equal_first", [True, False])
def test_passes_after_the_one_that_averages_are_looked_at_first(equal_first: bool) -> None:
    """Four passes per step, in three of which DDP averages nothing; the gradients are local in the end."""

    def samples(q: int) -> tuple[Sample, ...]:
        values = ((k, Sample("gradients", k, 0.5 + 0.01 * q)) for k in (0, 2, 4, 8, 16))
        return tuple(
            x for k, of in values for x in (Sample("parameters", k, 1.0 + q * max(0, k - 3 * equal_first), key=5), of)
        )

    model = msgspec.structs.replace(MODEL, forwards=64, synced_backwards=16)
    ranks = (rank(q, step=16, models=(model,), samples=samples(q)) for q in range(2))
    f = only(of_kind(found_in(job(*ranks)), "replica_drift"))
    assert f.cause == "update" and "DDP averages in one of about 4 passes" in f.message
    assert "`(i + 1) % n == 0`" in f.advice and "p.grad.copy_" not in f.advice


@pytest.mark.parametrize(
    ("norm", "shard", "found"),
    [(lambda q, k: 1.0 + q * k, 1.0, True), (lambda q, k: 1.0 + k, 1.0, False), (lambda q, k: 1.0 + q * k, 0.0, False)],
    ids=["drifts", "reduced", "no layer is split"],
)
def test_layers_that_were_equal_and_drift_among_split_ones_are_named(
    norm: Callable[[int, int], float], shard: float, found: bool
) -> None:
    """Sequence parallelism: the gradients of the norms are of a part of the sequence; those of the embedding are reduced."""

    def samples(q: int) -> tuple[Sample, ...]:
        values = {"LayerNorm": norm, "Split": lambda q, k: 1.0 + k + shard * q, "Embedding": lambda q, k: 1.0 + k}
        layers = (Sample("layers", k, of(q, k), key=4, name=name) for k in (0, 32, 64) for name, of in values.items())
        drift = (x for k in (32, 64) for x in (Sample("parameters", k, 1.0 + q * k, key=5), Sample("reduced", k, 0.2)))
        return (*layers, *drift)

    of = of_kind(found_in(job(*(rank(q, models=(), samples=samples(q)) for q in range(2)))), "replica_drift")
    assert [(f.cause, f.severity) for f in of] == [("gradients_not_synced", "warning")] * found
    if found:
        assert (
            "nothing reduces the gradients of LayerNorm" in of[0].message
            and "those of Embedding stay equal" in of[0].message
        )


@pytest.mark.parametrize(
    ("sparse", "reduced", "more", "severity"),
    [
        (True, 40, {}, "warning"),
        (False, 40, {}, "info"),
        (True, 90, {}, None),  # something else is reduced, too
        (True, 0, {}, None),
        (
            True,
            40,
            {"calls": (Call(op="all_to_all", group="default_pg", seq=8, bytes=1 << 20),)},
            None,
        ),  # rows of the tables of all ranks
        (True, 40, {"p2p_issued": {("default_pg", 1, 0): 3}}, None),
    ],
)
def test_layers_whose_gradients_are_left_out_of_the_reduction_are_named(
    sparse: bool, reduced: int, more: dict[str, Any], severity: str | None
) -> None:
    def samples(q: int) -> tuple[Sample, ...]:
        values = {
            "Embedding": (lambda k: 1.0 + q * k, 5 | sparse << 33 | 900 << 34),
            "Linear": (lambda k: 1.0 + k, 5 | 40 << 34),
        }
        layers = (Sample("layers", k, of(k), key, name) for name, (of, key) in values.items() for k in (0, 32, 64))
        drift = (Sample("parameters", k, 1.0 + q * k, key=5) for k in (0, 32, 64))
        return (*layers, *drift, *(Sample("reduced", k, reduced / 940, key=reduced) for k in (32, 64)))

    s = job(*(rank(q, models=(), samples=samples(q), **more) for q in range(2)))
    of = of_kind(found_in(s), "replica_drift")
    assert [f.severity for f in of] == [severity] * (severity is not None)
    if of:
        kind = "the sparse" if sparse else "the"
        assert f"nothing reduces {kind} gradients of Embedding: these parameters agreed on all ranks" in of[0].message
        assert ("sparse=False" in str(of[0].advice)) is sparse
    left = [x for x in replica_drift.evaluate(Facts(s)) if isinstance(x, Abstained) and x.cause is None]
    assert [x.checked for x in left] == [False], "they began equal: that they differ is not taken for the structure"


@pytest.mark.parametrize(("apart", "found"), [(0.1, True), (0.0, False)])
def test_a_teacher_outside_ddp_that_differs_is_reported(apart: float, found: bool) -> None:
    """A deep copy that was made before DDP made the replicas equal."""

    def samples(q: int) -> tuple[Sample, ...]:
        steps = (32, 64, 96)
        teacher = (Sample("untrained", k, 1.0 + apart * q, key=7, name="Teacher") for k in steps)
        return (*(Sample("parameters", k, 1.0 + k, key=5) for k in steps), *teacher)

    of = of_kind(found_in(job(*(rank(q, samples=samples(q)) for q in range(2)))), "replica_drift")
    assert [(f.cause, f.severity, f.certainty) for f in of] == [("different_init", "warning", "suspected")] * found
    if found:
        assert "parameters or buffers of Teacher differ between the ranks" in of[0].message and "broadcast" in (
            of[0].advice or ""
        )


@pytest.mark.parametrize(
    ("since", "words"),
    [(64, "no DDP module had"), (32, "no DDP module had"), (16, "then they changed in different ways")],
)
def test_parameters_outside_ddp_that_drift_first_are_the_cause_of_the_drift_of_ddps(since: int, words: str) -> None:
    """The norm over all gradients carries it over."""

    def samples(q: int) -> tuple[Sample, ...]:
        adapters = (
            Sample("outside_ddp", k, 1.0 + 0.1 * q * k * (k > 16), key=7, name="adapters")
            for k in (4, 8, 16, 32, 64, 96)
        )
        wrapped = (Sample("parameters", k, 1.0 + 0.01 * q * k * (k >= since), key=5) for k in (4, 8, 16, 32, 64, 96))
        return (*adapters, *wrapped)

    drift = of_kind(found_in(job(*(rank(q, samples=samples(q)) for q in range(2)))), "replica_drift")
    assert words in only(drift).message and drift[0].severity == "error"
    assert (f"those of DDP drift since step {since} or earlier, too" in drift[0].message) is (since >= 32)


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
    assert suspected(ranks, "not those of the parameters that have been trained since") == ([96] if found else [])


def with_rates(values: Callable[[int, int], float], rates: Callable[[int, int], float], **more: Any) -> Finding:
    """Return the drift of three ranks whose learning rates were sampled with their checksums."""
    model = msgspec.structs.replace(MODEL, **more)
    steps = (0, 2, 4, 8, 16)

    def samples(q: int) -> tuple[Sample, ...]:
        return tuple(
            x
            for k in steps
            for x in (Sample("parameters", k, values(q, k), key=5), Sample("learning_rate", k, rates(q, k)))
        )

    ranks = [rank(q, step=16, models=(model,), samples=samples(q)) for q in range(3)]
    return only(of_kind(found_in(job(*ranks)), "replica_drift"))


@pytest.mark.parametrize("equal_again", [False, True])
def test_steps_that_a_rank_alone_skips_are_the_reason_before_what_is_compared_step_by_step(equal_again: bool) -> None:
    """Rank 1 skips two steps; rank 0 may skip as many later. The ranks are polled at different moments: only equal steps are compared."""

    def samples(q: int) -> tuple[Sample, ...]:
        passes = {k: k + 2 * (1 if equal_again and k == 16 else q) * (k > 4) for k in (0, 2, 4, 8, 16)}
        of = (
            (
                Sample("parameters", k, 1.0 + 0.1 * q * (k > 4), key=5 | n << 32),
                Sample("learning_rate", k, 0.1 + 0.001 * q),
            )
            for k, n in passes.items()
        )
        return tuple(x for pair in of for x in pair)

    ranks = [
        rank(
            q,
            step=18 if equal_again else 20 - 2 * q,
            models=(msgspec.structs.replace(MODEL, forwards=21, synced_backwards=20 + q),),
            samples=samples(q),
            phase_stacks={"optimizer": (Site("/job/nan.py", 5, "main"),)}
            if q
            else {"backward": (Site("/job/nan.py", 2, "main"),)},
        )
        for q in range(2)
    ]
    text = "def main():\n  for x in batches:\n    if not loss(x).isfinite():\n      continue\n    optimizer.step()\n"
    f = only(of_kind(findings(job(*ranks), replica_drift, source={"/job/nan.py": text}.get), "replica_drift"))
    assert "`if not loss(x).isfinite()` at nan.py:3 in main may be what decides" in f.advice
    assert (
        "optimizer.step() was left out after different numbers of backward passes (0 on rank 0; 2 on rank 1)"
        in f.message
    )
    assert "let all ranks decide together" in f.advice and [(w.rank, w.line) for w in f.where] == [(0, 2), (1, 5)]
    assert "learning rates" not in f.message and f.culprits == ()


def test_learning_rates_that_differ_are_the_reason() -> None:
    f = with_rates(lambda q, k: 1.0 + 0.1 * (q == 2 and k > 4), lambda q, k: 1e-4 if q == 2 and k > 4 else 1e-3)
    assert f.culprits == (2,) and "0.001 on ranks 0, 1; 0.0001 on rank 2" in f.message and "scheduler" in f.advice
    # gradients are accumulated over two backwards: only one of them is synchronised
    f = with_rates(lambda q, k: 1.0 + 0.1 * q * k, lambda q, k: 0.1 * (q + 1), forwards=32, synced_backwards=16)
    assert f.culprits == () and "learning rates differ" in f.message


def in_pairs(
    groups: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)), began: str = "0101", shape: tuple[int, ...] = (600,), op: str = "all_reduce",
) -> list[Finding | Abstained]:  # fmt: skip
    """Return what is yielded for two tensor parallel pairs of 600 elements a rank, whose ranks average their gradients in `groups`."""
    tp = ((0, 1), (2, 3))
    names = {f"group {i}": Group(name=f"group {i}", ranks=of, backend="gloo") for i, of in enumerate((*tp, *groups))}
    made = made_steps()

    def of_rank(q: int) -> RankState:
        activations, gradients = (name for name, g in names.items() if q in g.ranks)
        layers = (Sample("layers", 0, q, key=4 | n << 34, name=name) for name, n in (("Split", 400), ("Norm", 200)))
        sums = (Sample("parameters", k, float(began[q]) + k * (2 + q // 2), key=5) for k in (0, 8, 16))
        calls = [(made[-1].end_s - 0.01, op, gradients, shape, 83)]
        calls += [(made[-1].end_s - 0.05 * k, "all_reduce", activations, (64,), 43) for k in range(1, 9)]
        return rank(
            q, models=(), step=60, steps=made, samples=(*layers, *sums), enqueued={activations: 120, gradients: 60},
            calls=tuple(Call(op=op, group=g, shape=of, bytes=4 * of[0], site=Site("/job/tp.py", line), entered_s=t)
                        for t, op, g, of, line in calls),
        )  # fmt: skip

    return [
        x
        for x in replica_drift.evaluate(Facts(job(*map(of_rank, range(4)), groups=names)))
        if not x.cause or isinstance(x, Finding)
    ]


def test_gradients_that_the_wrong_groups_average_are_found_by_what_their_ranks_began_with() -> None:
    not_compared, f = in_pairs()
    assert isinstance(not_compared, Abstained) and not not_compared.checked
    assert not_compared.reason.startswith("ranks 0, 1 and ranks 2, 3 exchange nothing in most steps")
    assert isinstance(f, Finding) and (f.severity, f.certainty) == ("warning", "suspected")
    assert "those with equal ones, ranks 0, 2 and ranks 1, 3" in f.message and [w.line for w in f.where] == [83] * 4


@pytest.mark.parametrize(
    "more",
    [
        {"groups": ((0, 2), (1, 3))},  # the right ones
        {"began": "0000"},  # a sweep, or folds of a cross validation, with one seed
        {"began": "0011"},  # an ensemble, a population
        {"began": "0123"},
        {"shape": (200,)},  # what each rank of a split model has whole
        {"shape": (1024,)},  # activations, features of a contrastive loss
        {"op": "all_gather_into_tensor"},
    ],
)
def test_sets_of_ranks_that_average_what_is_equal_in_them_are_healthy(more: dict[str, Any]) -> None:
    assert [x for x in in_pairs(**more) if isinstance(x, Finding)] == []


def split_pairs(
    embedding: Callable[[int, int], float], key: int = 4, op: str = "all_reduce", rates: int = 0, **more: Any
) -> list[Finding]:
    """Return the findings of four ranks, two data parallel pairs of two tensor parallel ranks, by rank and step of a whole class."""
    tp = {"tp 0": (0, 1), "tp 1": (2, 3), "dp 0": (0, 2), "dp 1": (1, 3)}
    groups = {name: Group(name=name, ranks=of, backend="gloo") for name, of in tp.items()}

    def samples(q: int) -> tuple[Sample, ...]:
        values = {"Split": lambda q, k: 1.0 + k + q % 2, "Embedding": embedding}
        layers = (Sample("layers", k, of(q, k), key=key, name=name) for k in (0, 32, 64) for name, of in values.items())
        drift = (Sample("parameters", k, 1.0 + k * (1 + q % 2), key=5) for k in (32, 64))
        return (*layers, *drift, Sample("learning_rate", 64, 0.1, key=rates))

    def of_rank(q: int) -> RankState:
        mine = more.get("group", f"tp {q // 2}"), f"dp {q % 2}"
        calls = tuple(Call(op=op, group=g, seq=9, bytes=4096) for g in mine)
        return rank(q, models=(), samples=samples(q), calls=calls, enqueued=dict.fromkeys(mine, more.get("calls", 500)),
                    p2p_issued=more.get("p2p", {}))  # fmt: skip

    return of_kind(found_in(job(*map(of_rank, range(4)), groups=groups)), "replica_drift")


def apart_by_pair(q: int, k: int) -> float:
    return 1.0 + k * (1 + 0.1 * (q % 2))


def test_what_ranks_of_a_split_model_have_whole_and_drifts_between_them_is_reported() -> None:
    """Gradients are clipped by the norm of each rank's own parts; data parallel peers stay equal."""
    f = only(split_pairs(apart_by_pair))
    assert (f.cause, f.severity, f.certainty, f.where) == ("gradients_not_synced", "warning", "suspected", ())
    assert (
        "Embedding agreed on all ranks before the first step and differ between ranks 0, 2 and ranks 1, 3" in f.message
    )
    assert "a model that ranks 0, 1 split between them (Split)" in f.message and "squared norm" in str(f.advice)


@pytest.mark.parametrize(
    ("embedding", "more"),
    [
        (lambda q, k: 1.0 + k, {}),  # all is well
        (lambda q, k: 1.0 + k * (1 + 0.1 * q), {}),  # no peers
        (lambda q, k: 1.0 + q % 2 + k, {}),  # each pair its own from the start
        (apart_by_pair, {"key": 4 | 1 << 32}),  # began as one constant: it may be split
        (apart_by_pair, {"rates": 1 << 32}),  # FSDP's shards
        (apart_by_pair, {"group": "dp 0"}),  # an ensemble: nothing is exchanged
        (apart_by_pair, {"calls": 9}),  # only now and then
        (apart_by_pair, {"op": "all_gather"}),  # outputs of members that learn from each other
        (apart_by_pair, {"p2p": {("tp 0", 1, 0): 3}}),  # stages of a pipeline
    ],
)  # fmt: skip
def test_sets_of_ranks_with_models_of_their_own_are_no_split_model(
    embedding: Callable[[int, int], float], more: dict[str, Any]
) -> None:
    assert split_pairs(embedding, **more) == []


def beside_fsdp(
    values: Callable[[int, int], float],
    op: str = "reduce_scatter_tensor",
    n_bytes: int = 1 << 20,
    share: float = 1.0,
    **more: Any,
) -> list[Finding]:
    """Return the findings of ranks whose parameters that FSDP does not shard had these checksums, by rank and step."""

    def samples(q: int) -> tuple[Sample, ...]:
        scale = (
            Sample("outside_fsdp", k, values(q, k), key=7, name="1 parameter (one element)") for k in (0, 2, 4, 8, 32)
        )
        return (*scale, *(Sample("reduced", k, share) for k in (2, 4, 8, 32)))

    calls = (Call(op="all_gather_into_tensor", group="default_pg", seq=8, bytes=1 << 20), Call(op="all_reduce", group="default_pg", seq=9, bytes=8),
             Call(op=op, group="default_pg", seq=10, bytes=n_bytes))  # fmt: skip
    ranks = [rank(q, models=(), samples=samples(q), calls=calls, **more) for q in range(2)]
    return of_kind(found_in(job(*ranks)), "replica_drift")


def test_parameters_that_fsdp_ignores_and_nothing_averages_are_reported() -> None:
    """The temperature of a contrastive loss has no dimension to be sharded by."""
    f = only(beside_fsdp(lambda q, k: 2.0 + 0.01 * k * (q + 1)))
    assert (f.cause, f.severity, f.certainty, f.step) == ("gradients_not_synced", "warning", "suspected", 2)
    assert (
        "steps 1 parameter (one element) that FSDP does not shard" in f.message
        and "(checksums agreed within rounding at step 0)" in f.message
    )
    assert "ReduceOp.AVG" in str(f.advice)


def test_parameters_that_fsdp_leaves_out_drift_although_all_gradients_are_reduced() -> None:
    """Each rank clips by the norm of its own shards, for example."""
    f = only(beside_fsdp(lambda q, k: 2.0 + 0.01 * k * (q + 1), op="all_reduce"))
    assert (f.cause, f.severity, f.certainty, f.step) == ("update", "warning", "suspected", 2)
    assert "the ranks' copies do not stay equal, although the script reduces gradients in each step" in f.message
    assert "all_reduce the squared norm" in str(f.advice)


@pytest.mark.parametrize(
    ("values", "more"),
    [
        (lambda q, k: 2.0 + 0.01 * k, {}),  # averaged by hand
        (lambda q, k: 2.0 + 0.01 * (k + 1) * (q + 1), {}),  # each rank began with its own
        (lambda q, k: 2.0 + 0.01 * k * (1 + q * (k > 2)), {}),  # averaged at first: something else is wrong
        (lambda q, k: 2.0 + 0.01 * k * (q + 1), {"op": "all_to_all"}),  # experts
        (lambda q, k: 2.0 + 0.01 * k * (q + 1), {"op": "all_reduce", "share": 0.95}),  # metrics, and each rank's own
        (lambda q, k: 2.0 + 0.01 * k * (q + 1), {"share": 0.5}),  # FSDP within a node
        (lambda q, k: 2.0 + 0.01 * k * (q + 1), {"p2p_issued": {("default_pg", 1, 0): 3}}),  # stages
    ],
)  # fmt: skip
def test_parameters_beside_fsdps_that_are_averaged_or_each_ranks_own_are_no_fault(
    values: Callable[[int, int], float], more: dict[str, Any]
) -> None:
    assert beside_fsdp(values, **more) == []


def averaged_apart(
    unwritten: tuple[int, ...] = (4, 8, 16), began: float = 0.0, apart: float = 0.1, key: int = 5, **call: Any
) -> list[Finding]:
    """Return the findings of ranks that average tensors after some steps, without effect."""

    def samples(q: int) -> tuple[Sample, ...]:
        drift = (Sample("parameters", k, 1.0 + k + q * (began + apart * k), key=5) for k in (0, 2, 4, 8, 16))
        return (
            *drift,
            *(Sample("not_written_back", k, 1.0 + k + q * apart, key=key) for k in unwritten),
            Sample("averaged", 8, 1.0),
        )

    of = Call(
        **{"op": "all_reduce", "group": "default_pg", "seq": 9, "bytes": 4096, "entered_s": 3.01, "completed_s": 3.02}
        | call
    )
    ranks = [rank(q, models=(), samples=samples(q), calls=(of,), steps=made_steps()) for q in range(2)]
    return of_kind(found_in(job(*ranks)), "replica_drift")


def test_averages_that_are_not_written_back_are_reported() -> None:
    f = only(averaged_apart())
    assert (f.cause, f.severity, f.certainty) == ("gradients_not_synced", "warning", "suspected")
    assert "the averages do not reach them" in f.message and "p.copy_(averaged)" in str(f.advice)
    assert only(averaged_apart(asynchronous=True)).message == f.message, "all are waited for at once"


def test_averages_that_come_later_or_of_other_models_are_no_fault() -> None:
    assert averaged_apart(unwritten=()) == averaged_apart(unwritten=(8,)) == [], "local SGD"
    assert averaged_apart(apart=0.0) == averaged_apart(key=1 << 32) == []
    assert averaged_apart(began=0.1) == [], "each rank has its own model"
    assert averaged_apart(asynchronous=True, completed_s=3.25) == [], "applied a step later"
    assert averaged_apart(asynchronous=True, completed_s=None) == []
    assert averaged_apart(other_thread=True) == []


def own_parts(
    rates: Callable[[int, int], float], key: int = 0, apart: float = 0.0, which: int = 0, sent: int = 4096, **more: Any
) -> list[Finding]:
    """Return the findings of three ranks that step parts of one model, whose rates were sampled; by rank and step.

    Args:
        key: Of the rates; bit 32: the parameters are sharded.
        apart: Distance of the parameters of the ranks after each step.
        which: Ranks above 0 have other parameters to this extent.
        sent: Bytes that each rank broadcasts after a step.
    """
    at = (0, 2, 4, 8, 16, 32)

    def samples(q: int) -> tuple[Sample, ...]:
        of = [Sample("learning_rate", k, rates(q, k), key=key) for k in at[1:]]
        if key >> 32 & 1:
            return (*of, *(Sample("reduced", k, more.get("share", 1.0)) for k in at[1:]))
        return (*of, *(Sample("parameters", k, k + apart * q * k, key=5 + which * q) for k in at))

    call = Call(op="broadcast", group="default_pg", seq=9, bytes=sent, entered_s=90.0)
    models = () if key >> 32 & 1 else (MODEL,)
    of = [rank(q, models=models, samples=samples(q), calls=(call,), steps=made_steps()) for q in range(3)]
    return of_kind(found_in(job(*of)), "replica_drift")


def test_rates_that_differ_where_each_rank_steps_a_part_of_the_model_are_reported() -> None:
    """ZeRO keeps the replicas equal, and FSDP's shards cannot be compared."""
    warmup, on_rank_0 = lambda q, k: 0.1 * k, lambda q, k: 0.1 * (k if q == 0 else 1)
    for key, certain in ((0, "suspected"), (3 << 32, "proved")):
        f = only(own_parts(on_rank_0, key))
        assert (f.cause, f.severity, f.certainty, f.culprits) == ("learning_rates", "warning", certain, (1, 2))
        assert "3.2 on rank 0" in f.message and "ranks 1, 2 has not changed since step 2" in f.message
        assert "`step()` on all ranks" in str(f.advice) and "drift" not in f.message
        assert own_parts(warmup, key) == []
        assert own_parts(lambda q, k: 0.1 * (q + 1 if k < 16 else 1), key) == [], "equal again"
    assert only(own_parts(lambda q, k: 0.1 * k + (q == 1), 0)).culprits == (1,)


def test_rates_of_ranks_that_do_not_step_parts_of_one_model_may_differ() -> None:
    other = lambda q, k: 0.1 * (q + 1)  # noqa: E731
    assert own_parts(other, 1 << 32, share=0.3) == [], "shards within a node"
    assert own_parts(other, which=1) == [], "each rank's optimizer has other layers, with their own rates"
    assert own_parts(other, sent=8) == [], "the optimizer may not use its rate"
    assert all("a part of the" not in f.message for f in own_parts(other, apart=0.1)), "replicas that drift"


@pytest.mark.parametrize(
    ("completed_s", "asynchronous", "named"), [(None, True, True), (9.0, True, False), (None, False, False)]
)
def test_asynchronous_reductions_that_nobody_waits_for_are_the_reason(
    completed_s: float | None, asynchronous: bool, named: bool
) -> None:
    site = Site("/job/sync.py", 24, "reduce_buffer")
    call = Call(
        op="all_reduce", group="default_pg", seq=9, bytes=1 << 20, site=site, asynchronous=asynchronous, completed_s=completed_s,
    )  # fmt: skip
    f = only(drifting(lambda q, k: 1.0 + 0.1 * q * k**0.5, 1.0, models=(), calls=(call,)))
    assert ("no rank waits for the asynchronous all_reduce of its gradients at sync.py:24" in f.message) is named
    assert (str(f.advice).startswith("keep what `all_reduce(…, async_op=True)` returns")) is named


@pytest.mark.parametrize("since", [64, 0])
@pytest.mark.parametrize(("before", "named"), [((250, 0, 0), True), ((250, 250, 250), False), (None, False)], ids=str)
def test_optimizers_of_which_one_has_loaded_its_state_are_the_reason(
    before: tuple[int, int, int] | None, named: bool, since: int
) -> None:
    """Rank 0 alone loads a checkpoint, in the middle of the run: rates differ for a while, too. At its start, the others may be wrong."""

    def samples(q: int) -> tuple[Sample, ...]:
        steps = (*([0] if not since else []), 32, 64, 96, 128)
        drift = [Sample("parameters", k, k + 0.1 * k * (q == 0 and k > since), key=5) for k in steps]
        rates = [Sample("learning_rate", k, 0.01 if q == 0 and k == 96 else 0.1) for k in steps if named]
        counts = [
            Sample("optimizer_steps", k, float(k + (before[q] if k > since else 0))) for k in steps if before and k
        ]
        return (*drift, *rates, *counts)

    stacks = {"backward": (Site("/job/fit.py", 7, "fit"),), "optimizer": (Site("/job/fit.py", 9, "fit"),)}
    ranks = (rank(q, samples=samples(q), phase_stacks=stacks) for q in range(3))
    f = only(of_kind(found_in(job(*ranks)), "replica_drift"))
    assert f.culprits == (() if named and not since else (0,)) and f.cause == "update"
    assert {w.line for w in f.where} == ({9} if named else set())
    assert f"(checksums agreed within rounding at step {since})" in f.message and "loaded epoch" not in f.cost
    assert ("counted different numbers of steps (128 on ranks 1, 2; 378 on rank 0)" in f.message) is named
    assert ("load one checkpoint on all ranks, with the optimizer's state" in str(f.advice)) is named


@pytest.mark.parametrize(
    ("value", "reason", "checked"),
    [
        (lambda q, k: 1.0, "agree at 5 steps that were compared (the newest is 16)", True),
        (
            lambda q, k: 1.0 + q * (k == 4),
            "differ at 1 of 5 steps that were compared, but not at both of the newest two",
            True,
        ),
        (lambda q, k: math.nan, "no checksum of parameters is finite", False),
    ],
)
def test_what_was_compared_is_told_with_its_steps(
    value: Callable[[int, int], float], reason: str, checked: bool
) -> None:
    samples = [tuple(Sample("parameters", k, value(q, k), key=5) for k in (0, 2, 4, 8, 16)) for q in range(2)]
    s = job(*(rank(q, samples=mine) for q, mine in enumerate(samples)))
    why = next(x for x in replica_drift.evaluate(Facts(s)) if isinstance(x, Abstained) and not x.cause)
    assert reason in why.reason and why.checked is checked


def test_learning_rates_that_agree_or_gradients_that_are_not_averaged_have_other_reasons() -> None:
    f = with_rates(lambda q, k: 1.0 + 0.1 * (q == 2 and k > 4), lambda q, k: 1e-3)
    assert "learning rate" not in f.message
    f = with_rates(lambda q, k: 1.0 + 0.1 * q, lambda q, k: 0.1 * (q + 1), forwards=32, synced_backwards=0)
    assert "their gradients are not averaged" in f.message


def test_weights_loaded_into_wrapped_replicas_are_not_unsynchronised_gradients() -> None:
    """DDP has made them equal: only what differs before the first step began so. After it, the optimizers' states may differ."""

    def cause(values: Callable[[int, int], float], synced: int = 16) -> str | None:
        return with_rates(values, lambda q, k: 1e-3, forwards=16, synced_backwards=synced).cause

    assert cause(lambda q, k: 1.0 + 0.01 * k + 0.1 * (q == 1)) == "different_init"
    assert cause(lambda q, k: 1.0 + 0.01 * k + 0.1 * (q == 1), synced=0) == "gradients_not_synced"
    for power in (0.5, 1.0):
        assert cause(lambda q, k, power=power: 1.0 + 0.01 * q * k**power) == "update"
    assert cause(lambda q, k: 1.0 + 0.1 * (q == 1 and k > 0)) == "update"
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
    apart = only(drifting(lambda q, k: 1.0 + 0.1 * q * k**0.5, 1.0, models=()))  # averaged gradients keep the distance
    assert (
        apart.cause == "update"
        and "do not keep one distance: their updates differ" in apart.message
        and "work.wait()" in (apart.advice or "")
    )
    assert "no rank waits" not in apart.message
    later = only(drifting(lambda q, k: float(q == 1 and k > 4), 1.0, models=()))  # equal at first: one skips a step
    assert (later.cause, later.culprits, later.step) == ("update", (1,), 8)
    assert "then those of rank 1 changed in another way than the others" in later.message
    most = only(drifting(lambda q, k: 1.0 + 0.1 * q * k, 0.96, models=()))  # biases may have been forgotten
    assert (most.severity, most.certainty) == (
        "info",
        "suspected",
    ) and "96 % of the gradients' elements" in most.message
    assert drifting(lambda q, k: float(q), 0.6, models=()) == []  # a rank's own experts next to shared parameters
    assert drifting(lambda q, k: float(q), 1.7, models=()) == []  # activations of a model split over the ranks


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


@pytest.mark.parametrize(
    ("values", "more", "found"),
    [(lambda q, k: 1.0 + 0.1 * q * k, {}, True), (lambda q, k: 1.0 + q, {}, False), (lambda q, k: 1.0 + k, {}, False)],
    ids=["own updates", "constants", "equal"],
)  # fmt: skip
def test_buffers_that_are_saved_and_updated_by_each_rank_are_drift(
    values: Callable[[int, int], float], more: dict[str, Any], found: bool
) -> None:
    model = msgspec.structs.replace(MODEL, **({"broadcast_buffers": False} | more))
    samples = [tuple(Sample("state", k, values(q, k), key=5, name="vq.codes") for k in (2, 4, 8, 16)) for q in range(2)]
    of = of_kind(found_in(job(*(rank(q, models=(model,), samples=samples[q]) for q in range(2)))), "replica_drift")
    assert [f.cause for f in of] == ["buffers"] * found
    if found:
        assert (
            "buffers that are saved with the model (vq.codes) are updated from each rank's own batches" in of[0].message
        )
        assert of[0].certainty == "suspected" and "persistent=False" in of[0].advice


@pytest.mark.parametrize(
    ("values", "calls", "found"),
    [(lambda q, k: 1.0 + 0.1 * q * k, (), True), (lambda q, k: 1.0 + q, (), False), (lambda q, k: 1.0 + k, (), False),
     (lambda q, k: 1.0 + 0.1 * q * k, (Call(op="all_reduce", group="default_pg", seq=9, bytes=4096),), False)],
    ids=["own updates", "constants", "equal", "averaged now and then"],
)  # fmt: skip
def test_parameters_that_no_gradient_trains_and_each_rank_updates_are_drift(
    values: Callable[[int, int], float], calls: tuple[Call, ...], found: bool
) -> None:
    """A codebook that is a parameter, moved by hand; a frozen backbone is equal."""
    samples = [tuple(Sample("frozen", k, values(q, k), key=5, name="vq.code") for k in (2, 4, 8, 16)) for q in range(2)]
    stacks = {"backward": (Site("/job/fit.py", 7, "fit"),)}
    ranks = (rank(q, calls=calls, samples=samples[q], phase_stacks=stacks) for q in range(2))
    of = of_kind(found_in(job(*ranks)), "replica_drift")
    assert [(f.cause, f.severity, f.certainty, f.where) for f in of] == [("update", "warning", "suspected", ())] * found
    assert not found or "no gradient trains (vq.code) are updated from each rank's own batches" in of[0].message


@pytest.mark.parametrize(
    ("values", "more", "found"),
    [(lambda q, k: 1.0 + k + 0.1 * q, {}, True), (lambda q, k: 1.0 + k, {}, False), (lambda q, k: 1.0 + k + q * (k < 8), {}, False),
     (lambda q, k: 1.0 + k + 0.1 * q, {"synced_backwards": 4}, False)],
    ids=["own updates", "equal", "equal since", "not trained by DDP"],
)  # fmt: skip
def test_buffers_that_each_rank_updates_and_ddp_overwrites_are_reported(
    values: Callable[[int, int], float], more: dict[str, Any], found: bool
) -> None:
    """Moving averages of codes; running statistics are in "buffers" only."""
    model = msgspec.structs.replace(MODEL, **({"forwards": 20, "synced_backwards": 20} | more))
    assert model.broadcast_buffers
    samples = [tuple(Sample("state", k, values(q, k), key=5, name="vq.codes") for k in (2, 4, 8, 16)) for q in range(2)]
    ranks = [rank(q, step=20, models=(model,), samples=x) for q, x in enumerate(samples)]
    of = of_kind(found_in(job(*ranks)), "replica_drift")
    assert [(f.cause, f.severity, f.certainty) for f in of] == [("buffers", "warning", "suspected")] * found
    evaluated = [(*x, *(Sample("eval_mode", k, float(q)) for k in (2, 4, 8, 16))) for q, x in enumerate(samples)]
    modes = of_kind(
        found_in(job(*(rank(q, step=20, models=(model,), samples=x) for q, x in enumerate(evaluated)))), "replica_drift"
    )
    assert [f.cause for f in modes] == ["mode"], "a rank in eval mode updates nothing"
    if found:
        assert "(vq.codes) differ" in of[0].message and "overwrites them with those of rank 0" in of[0].message


def test_buffers_that_are_equal_again_after_a_warning_are_an_info() -> None:
    """As statistics of each rank's own batches that the script freezes later."""
    engine, model = Diagnosis(lambda path: None), msgspec.structs.replace(MODEL, forwards=40, synced_backwards=40)
    steps, told = (2, 4, 8, 16, 32), []
    for n in (3, 4, 5):
        values = [tuple(Sample("state", k, k + 0.1 * q * (k < 16), key=5) for k in steps[:n]) for q in range(2)]
        ranks = (rank(q, step=steps[n - 1], models=(model,), samples=x) for q, x in enumerate(values))
        engine.update(job(*ranks, t_s=10.0 * n))
        told.append(only(of_kind(engine.findings, "replica_drift")))
    assert [f.severity for f in told] == ["warning", "warning", "info"] and "compared" not in told[0].message
    assert "at 3 of 5 steps that were compared, but not at the newest two" in told[2].message


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ({0: 64, 1: 64, 2: 64}, "longer on its parameters (body.weight, …)"),
        ({0: 64, 1: 64}, ""),
        ({0: 96, 1: 96, 2: 96}, ""),  # later than the replicas came apart
        ({}, ""),
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_parameters_that_have_lost_ddps_hooks_are_the_reason(lost: dict[int, int], words: str, local: bool) -> None:
    """The module was converted after DDP had wrapped it."""
    ranks = []
    for q in range(3):
        found: list[Sample] = []
        for k in (16, 32, 64, 96):
            found.append(Sample("parameters", k, k + 0.1 * q * max(0, k - 32), key=5))
            found.append(Sample("gradients", k, 0.5 + 0.01 * q * local * (k > 32)))
            if k >= lost.get(q, 1000):
                found.append(Sample("hooks_lost", k, 8.0, key=8, name="body.weight"))
        ranks.append(rank(q, models=(MODEL,), samples=tuple(found)))
    f = only(of_kind(found_in(job(*ranks)), "replica_drift"))
    assert (
        (f.cause == "gradients_not_synced" and words in f.message and not f.culprits) if words else f.cause == "update"
    )
    assert ("are averaged" in f.message) is not bool(words)


def test_what_is_judged_beside_a_finding_counts_as_checked() -> None:
    """At an earlier poll one step had been sampled, too few."""
    samples = [
        tuple(
            Sample(kind, k, 1.0 + q * (kind == "state") + k, key=5) for kind in ("state", "buffers") for k in (2, 4, 8)
        )
        for q in range(2)
    ]
    of = replica_drift.evaluate(Facts(job(*(rank(q, models=(APART,), samples=x) for q, x in enumerate(samples)))))
    checked = {x.cause: x.checked for x in of if isinstance(x, Abstained)}
    assert checked["state"] and checked["buffers"]


def test_buffers_may_differ_by_their_batches_or_until_the_next_broadcast() -> None:
    assert buffers(1.0, 1.2) == []  # statistics of different batches of the same data
    assert buffers(1.0, 3.0, model=MODEL) == []  # broadcast before each forward
    assert buffers(1.0, 3.0, model=msgspec.structs.replace(APART, synced_backwards=0)) == []
    assert buffers(1.0, 3.0, at=()) == [] and buffers(1.0, 3.0, at=(2,)) == []  # not sampled, or only once


def test_buffers_that_were_equal_before_and_differ_a_little_are_info() -> None:
    ranks = [
        rank(
            q,
            models=(APART,),
            samples=tuple(Sample("buffers", k, 1.0 + 0.01 * q * (k > 8), key=5) for k in (2, 4, 16, 32)),
        )
        for q in range(2)
    ]
    f = only(of_kind(found_in(job(*ranks)), "replica_drift"))
    assert (f.cause, f.severity, f.step) == ("buffers", "info", 16) and "agreed before and differ now" in f.message


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


def test_unfrozen_parameters_whose_gradients_may_be_reduced_by_hand_are_no_drift() -> None:
    sample = Sample(kind="unfrozen", step=9, value=2.0, name="body.weight")
    reduced = Sample(kind="reduced", step=9, value=0.5)

    def of(*samples: Sample) -> list[Finding]:
        return findings(job(rank(0, samples=samples), rank(1, samples=samples)), replica_drift)

    assert only(of(sample)).names == ("body.weight",)
    assert of(sample, reduced) == []


@pytest.mark.parametrize("unfrozen", [True, False])
def test_parameters_that_were_frozen_when_ddp_was_built_are_not_said_to_be_frozen_still(unfrozen: bool) -> None:
    model = msgspec.structs.replace(MODEL, frozen=1, frozen_names=(("body.weight", 8),))
    sample = (Sample(kind="unfrozen", step=9, value=2.0, name="body.weight"),) if unfrozen else ()
    found = findings(job(*(rank(q, models=(model,), samples=sample) for q in (0, 1))), replica_drift, unused_parameters)
    assert [f.cause for f in found] == ["gradients_not_synced" if unfrozen else "frozen"]


def test_what_was_frozen_is_cleared_once_some_of_it_has_gradients() -> None:
    model = msgspec.structs.replace(MODEL, frozen=1, frozen_names=(("body.weight", 8),))
    sample = Sample(kind="unfrozen", step=9, value=2.0, name="body.weight")
    d = Diagnosis(source=lambda _: None)
    for t in range(12):
        d.update(job(*(rank(q, models=(model,), samples=(sample,) * (t > 2)) for q in (0, 1)), t_s=float(t)))
    assert {f.cause: f.cleared_s is None for f in d.findings} == {"frozen": False, "gradients_not_synced": True}


def test_ranks_that_split_a_module_are_compared_in_what_each_has_whole() -> None:
    """Two tensor parallel pairs that train on different data: only ranks of one pair must be equal."""

    def found(values: Callable[[int, int], float]) -> list[Finding]:
        ranks = [
            rank(q, models=(), samples=tuple(
                Sample("parameters", k, values(q, k), key=5, name="0-1" if q < 2 else "2-3") for k in (2, 4, 8, 16)
            ))
            for q in range(4)
        ]  # fmt: skip
        return of_kind(found_in(job(*ranks)), "replica_drift")

    assert found(lambda q, k: float(k + q // 2)) == []
    f = only(found(lambda q, k: float(k + (0.1 * k if q == 3 else 0.0))))
    assert (f.cause, f.culprits, f.victims) == ("split_module", (), (2, 3))
    assert "data parallel rank" in f.advice
    f = only(found(lambda q, k: float(k + 0.1 * k * (q % 2))))
    assert f.victims == (0, 1, 2, 3) and "ranks 2, 3 drift apart among each other, too" in f.message


@pytest.mark.parametrize(
    ("of_last", "found"), [((2, 2, 2), (2,)), ((2, 2, 0), ()), ((0, 2, 2), ()), ((0, 0, 0), ())], ids=str
)
def test_a_rank_that_trains_in_eval_mode_is_named(of_last: tuple[int, ...], found: tuple[int, ...]) -> None:
    def samples(values: tuple[int, ...]) -> tuple[Sample, ...]:
        return tuple(Sample("eval_mode", k, float(n)) for k, n in zip((32, 64, 96), values, strict=True))

    ranks = [rank(q, samples=samples((0, 0, 0))) for q in range(2)]
    s = job(*ranks, rank(2, samples=samples(of_last)))
    modes = of_kind(found_in(s), "replica_drift", "mode")
    assert [f.culprits for f in modes] == [found] * bool(found)
    if found:
        assert "rank 2 trains with 2 dropout or batch-norm layers in eval mode since step 32" in modes[0].message
        assert "`model.train()` on all ranks" in modes[0].advice


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ((0, 0, 4, 4, 4), 96),  # after a validation
        ((0, 4, 0, 4, 4), None),  # too few so far
        ((0, 0, 3, 3, 3), None),  # some layers are frozen on purpose
        ((4, 4, 4, 4, 4), None),  # as it has begun
        ((0, 4, 4, 4, 0), None),
    ],
    ids=str,
)
def test_ranks_that_all_stay_in_eval_mode_are_told(values: tuple[int, ...], found: int | None) -> None:
    samples = tuple(Sample("eval_mode", 32 * (i + 1), float(n), key=4) for i, n in enumerate(values))
    modes = of_kind(found_in(job(rank(0, samples=samples), rank(1, samples=samples))), "replica_drift", "mode")
    assert [(f.step, f.culprits, f.severity) for f in modes] == ([(found, (), "warning")] if found else [])
    assert not modes or "`model.train()` at the end of each evaluation" in str(modes[0].advice)


def test_a_logged_value_that_was_equal_while_it_changed_and_differs_now_is_reported() -> None:
    def found(*of_ranks: Callable[[int], float]) -> list[Finding]:
        logged = [{"lr": tuple((k, f(k)) for k in range(1, 31))} for f in of_ranks]
        return of_kind(found_in(job(*(rank(q, logged=x) for q, x in enumerate(logged)))), "replica_drift", "logged")

    f = only(found(lambda k: 1 / k, lambda k: 1 / k, lambda k: 1 / k if k < 20 else 0.5 / k))
    assert (f.culprits, f.step, f.severity) == ((2,), 20, "warning")
    assert found(lambda k: 1 / k, lambda k: 1 / k) == []
    assert found(lambda k: 1 / k, lambda k: 2 / k) == [], "a local value"
    assert found(lambda k: 0.0 if k < 20 else 1.0, lambda k: 0.0) == [], "equal only while it was constant"


@pytest.mark.parametrize(
    ("what", "orders", "broadcasts", "found"),
    [
        ("parameter", (7, 8, 7), False, ("different_init", "error", "ranks 0, 2 and rank 1")),
        ("buffer", (7, 8, 9), True, ("buffers", "warning", "rank 0 and rank 1 and rank 2")),
        ("buffer", (7, 8, 7), False, None),  # each rank keeps its own
        ("parameter", (7, 7, 7), True, None),
        ("parameter", (7, 8 | 1 << 33, 7), True, None),  # other names
    ],
)
def test_tensors_that_are_registered_in_different_orders_are_reported(
    what: str, orders: tuple[int, ...], broadcasts: bool, found: tuple[str, str, str] | None
) -> None:
    """DDP exchanges them by position, as checksums compare them: these agree."""

    def model(order: int) -> Model:
        fields: Any = {"broadcast_buffers": broadcasts, f"{what}_order": order | 1 << 32}
        return msgspec.structs.replace(MODEL, **fields)

    of = found_in(job(*(rank(q, models=(model(order),)) for q, order in enumerate(orders))))
    assert [(f.cause, f.severity, f.culprits) for f in of] == ([(*found[:2], ())] if found else [])
    if found:
        assert f"({found[2]})" in of[0].message and "PYTHONHASHSEED" in str(of[0].advice)
