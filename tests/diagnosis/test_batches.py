"""Rules on the ranks' data: numbers, sizes and contents of batches."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import Call, Life, Loader, Sample, Snapshot, Step
from distdiag.diagnosis.rules import deadlock, duplicate_data, straggler, uneven_batches
from tests.diagnosis.made import LOOP, MODEL, findings, job, loader, of_kind, only, rank, steps


def data(s: Snapshot, source: str | None) -> list[Finding]:
    return findings(s, uneven_batches, duplicate_data, source=lambda _: source)


PLAIN = "def main():\n    for x, y in loader:\n        step(x, y)\n"


def uneven(source: str, **second: Any) -> list[Finding]:
    s = job(rank(0, loaders=(loader(),)), rank(1, loaders=(loader(length=90),), **second))
    return [f for f in data(s, source) if f.cause == "count"]


def test_unequal_loader_lengths_are_reported_before_the_hang() -> None:
    f = only(uneven(PLAIN))
    assert (f.culprits, f.victims, f.severity) == ((1,), (0,), "error")


@pytest.mark.parametrize(
    "source",
    [
        "def main():\n    for x, y in loader:\n        if step(x, y):\n            break\n",
        "def main():\n    for x, y in islice(loader, 50):\n        step(x, y)\n",
        "def main():\n    for i, b in zip(range(50), loader):\n        step(b)\n",
        "def main():\n    for x, y in loader:\n        try:\n            return step(x)\n        finally:\n            pass\n",
        "not python at all (",
    ],
)
def test_a_loop_that_may_end_early_is_not_judged(source: str) -> None:
    assert uneven(source) == []


def test_a_break_of_an_inner_loop_does_not_end_the_outer_one() -> None:
    assert uneven("def main():\n    for x, y in loader:\n        for _ in range(3):\n            break\n")


def test_join_makes_uneven_inputs_legal() -> None:
    assert uneven(PLAIN, in_join=True) == []


def prints(seed: int) -> tuple[int, ...]:
    r = random.Random(seed)
    return tuple(r.getrandbits(64) | 1 << 40 | 1 for _ in range(6))


def duplicates(a: Loader, b: Loader) -> list[Finding]:
    return [f for f in data(job(rank(0, loaders=(a,)), rank(1, loaders=(b,))), PLAIN) if f.kind == "duplicate_data"]


def test_the_same_batches_on_two_ranks_are_reported() -> None:
    f = only(duplicates(loader(first_fingerprints=prints(1)), loader(first_fingerprints=prints(1))))
    assert f.cause == "same_batches_on_ranks" and f.victims == (0, 1)
    assert duplicates(loader(first_fingerprints=prints(1)), loader(first_fingerprints=prints(2))) == []


@pytest.mark.parametrize(
    ("dataset_length", "severity"),
    [(1000, "warning"), (None, "info")],
    ids=["one data set for all", "a stream of each rank's own"],
)
def test_the_same_labels_with_other_values_prove_nothing(dataset_length: int | None, severity: str) -> None:
    a, b = prints(1), prints(2)
    same_labels = tuple(x >> 32 << 32 | y & 0xFFFFFFFF for x, y in zip(a, b, strict=True))
    f = only(
        duplicates(
            loader(first_fingerprints=a, dataset_length=dataset_length),
            loader(first_fingerprints=same_labels, dataset_length=dataset_length),
        )
    )
    assert (f.certainty, f.severity) == ("suspected", severity) and "same labels" in f.message


def test_synthetic_inputs_that_are_equal_are_info() -> None:
    fed = loader(fed=True, length=None, first_fingerprints=prints(1))
    f = only(duplicates(fed, fed))
    assert (f.severity, f.victims) == ("info", (0, 1)) and "seed" in f.advice
    assert duplicates(fed, loader(fed=True, length=None, first_fingerprints=prints(2))) == []


def test_a_loader_is_preferred_to_inputs_recorded_without_one() -> None:
    def both(seed: int) -> tuple[Loader, ...]:
        return loader(fed=True, batches=1000, first_fingerprints=prints(1)), loader(first_fingerprints=prints(seed))

    s = job(rank(0, loaders=both(2)), rank(1, loaders=both(3)))
    assert [f for f in data(s, PLAIN) if f.kind == "duplicate_data"] == []


def test_a_missing_set_epoch_is_reported_only_if_the_sampler_shuffles() -> None:
    def again(seed: int, shuffle: bool) -> Loader:
        return loader(
            distributed_sampler=True, shuffle=shuffle, iterations_started=2, first_fingerprints=prints(seed),
            previous_fingerprints=prints(seed), sampler_epoch=0,
        )  # fmt: skip

    assert only(duplicates(again(1, True), again(2, True))).cause == "same_order_every_epoch"
    assert duplicates(again(1, False), again(2, False)) == []


def test_a_sampler_that_stays_at_epoch_0_is_reported_although_values_are_augmented() -> None:
    def still(epoch: int, changed: int) -> list[Finding]:
        labels = [7, 7, 8, 9, 9, 7]  # few classes
        first = tuple(label << 32 | 1 + k for k, label in enumerate(labels))
        before = tuple(label + changed << 32 | 99 + k for k, label in enumerate(labels))
        more = {"shuffle": True, "distributed_sampler": True, "iterations_started": 4, "sampler_epoch": epoch}
        x = loader(first_fingerprints=first, previous_fingerprints=before, **more)
        found = data(job(*(rank(q, loaders=(x,)) for q in (0, 1))), PLAIN)
        return [f for f in found if f.cause == "same_order_every_epoch"]

    assert only(still(0, 0)).victims == (0, 1)
    assert still(3, 0) == [] and still(0, 1) == []


def without_group(difference: float, *ops: str) -> list[Finding]:
    """Return the findings of ranks with the same loader and no DDP; rank 1's checksums differ."""
    ranks = [
        rank(
            q,
            models=(),
            loaders=(loader(first_fingerprints=prints(1)),),
            samples=tuple(Sample("parameters", k, k + q * difference) for k in (2, 4, 8, 16)),
            calls=tuple(Call(op=op, group="default_pg", seq=None) for op in ops),
        )
        for q in (0, 1)
    ]
    return of_kind(data(job(*ranks, groups={}), PLAIN), "duplicate_data")


def test_ranks_without_a_process_group_that_do_the_same_work_are_reported() -> None:
    f = only(without_group(0.0))
    assert f.severity == "warning" and "no process group" in f.message
    assert without_group(0.1) == []  # a sweep over settings
    assert without_group(0.0, "init_process_group") == []


def of_size(*sizes: int, n: int = 40) -> tuple[Step, ...]:
    """Return steps with these local batch sizes, repeated."""
    return tuple(
        msgspec.structs.replace(x, batch=sizes[k % len(sizes)], samples=sizes[k % len(sizes)])
        for k, x in enumerate(steps(n=n))
    )


def of_sizes(*of_ranks: tuple[Step, ...], **more: Any) -> list[Finding]:
    ranks = [rank(q, steps=x, loaders=(loader(),), **more) for q, x in enumerate(of_ranks)]
    return of_kind(data(job(*ranks), None), "uneven_batches")


def test_the_rank_with_another_batch_size_is_named() -> None:
    f = only(of_sizes(of_size(8), of_size(8), of_size(2)))
    assert (f.cause, f.severity, f.certainty) == ("size", "warning", "proved")
    assert (f.culprits, f.victims) == ((2,), (0, 1))
    assert (f.where[0].rank, f.where[0].line) == (2, 2)  # the site of its loader
    assert "4.0x" in f.cost


def test_a_rank_that_shadows_collectives_has_no_wrong_batch_size() -> None:
    """Its steps have a loss of zero (a batch of one), and take no time, so that the others need not wait for it."""

    def shadow(zeros: int) -> tuple[Step, ...]:
        xs = of_size(1)
        return tuple(msgspec.structs.replace(x, loss=0.0 if k >= len(xs) - zeros else 1.0) for k, x in enumerate(xs))

    assert of_sizes(of_size(8), shadow(60)) == []
    assert [f.cause for f in of_sizes(of_size(8), shadow(1))] == ["size"]  # a loss may occasionally be zero
    late = rank(1, steps=steps(80.0, "other", seed=1))
    idle = [msgspec.structs.replace(x, loss=0.0) for x in steps(wait_ms=80.0)]
    assert of_kind(findings(job(rank(0, steps=tuple(idle)), late), straggler), "straggler") == []
    assert of_kind(findings(job(rank(0, steps=steps(wait_ms=80.0)), late), straggler), "straggler") != []


def test_two_ranks_with_different_batch_sizes_blame_nobody() -> None:
    f = only(of_sizes(of_size(8), of_size(4)))
    assert (f.cause, f.culprits, f.victims) == ("size", (), (0, 1)) and {w.rank for w in f.where} == {0, 1}


def test_equal_varying_or_unknown_batch_sizes_are_no_finding() -> None:
    assert of_sizes(of_size(8), of_size(8)) == []
    assert of_sizes(of_size(8), of_size(*[8] * 19, 3)) == []  # the last batch of each epoch is smaller
    assert of_sizes(of_size(8, 5), of_size(6, 3)) == []  # a token budget
    assert of_sizes(of_size(8), of_size(4, n=20)) == []  # too few steps
    assert of_sizes(of_size(8), of_size(0)) == []  # not measured
    apart = msgspec.structs.replace(MODEL, synced_backwards=0)
    assert of_sizes(of_size(8), of_size(4), models=(apart,)) == []  # nothing is averaged


def test_the_rank_that_ran_out_first_is_named_although_lengths_are_equal() -> None:
    """Rank 0 has left the loop after 45 batches; rank 1 is in the step of its 45th and has more."""
    out, more = loader(length=None, batches=45, exhausted=True), loader(length=None, batches=45)
    waits = Call(op="all_reduce", group="default_pg", seq=7, entered_s=5.0, site=LOOP)
    crashed = {"life": Life.CRASHED, "exception": "RuntimeError: Connection closed by peer", "ended_s": 99.0}
    s = job(
        rank(0, loaders=(out,), life=Life.FINISHED, ended_s=98.0), rank(1, loaders=(more,), calls=(waits,), **crashed)
    )
    f = only(findings(s, deadlock, uneven_batches))
    assert (f.kind, f.cause, f.culprits, f.victims) == ("uneven_batches", "count", (0,), (1,))
    assert (
        f.message.startswith("rank 0 ran out of batches after 45")
        and "rank 1 hangs: rank 0 has no batch left" in f.cost
    )


@pytest.mark.parametrize(("fits", "advice"), [(True, "seed NumPy"), (False, "the right rank and num_replicas")])
def test_equal_batches_from_a_correct_sampler_come_from_the_dataset(fits: bool, advice: str) -> None:
    prints = tuple(n << 32 | n for n in range(1, 7))
    same = loader(distributed_sampler=True, sampler_fits=fits, first_fingerprints=prints)
    f = only(findings(job(rank(0, loaders=(same,)), rank(1, loaders=(same,))), duplicate_data))
    assert f.cause == "same_batches_on_ranks" and advice in f.advice
