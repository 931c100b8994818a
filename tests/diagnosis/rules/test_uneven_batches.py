"""uneven_batches: ranks with other numbers or sizes of batches."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import Call, Life, Snapshot, Step
from distdiag.diagnosis.rules import deadlock, straggler, uneven_batches
from tests.diagnosis.made import LOOP, MODEL, findings, job, loader, of_kind, only, rank, steps


def data(s: Snapshot, source: str | None) -> list[Finding]:
    return findings(s, uneven_batches, source=lambda _: source)


PLAIN = "def main():\n    for x, y in loader:\n        step(x, y)\n"


def uneven(source: str, **second: Any) -> list[Finding]:
    s = job(rank(0, loaders=(loader(),)), rank(1, loaders=(loader(length=90),), **second))
    return [f for f in data(s, source) if f.cause == "count"]


def test_unequal_loader_lengths_are_reported_before_the_hang() -> None:
    f = only(uneven(PLAIN))
    assert (f.culprits, f.victims, f.severity) == ((1,), (0,), "error")


def test_the_loaders_of_two_passes_are_not_compared() -> None:
    """Each trial of a search makes a new loader with another batch size; a poll may find one rank in the next trial already."""
    s = job(*(rank(q, loaders=(loader(length=7 + 6 * q, iterations_started=11 + q),)) for q in (0, 1)))
    assert data(s, PLAIN) == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"distributed_sampler": True}, "pad or drop in the sampler"),
        ({"batch_size": None}, "cut or pad what it reads"),  # its list of batches decides how large each is
        ({"batch_size": 32}, "DistributedSampler (it pads)"),
    ],
)
def test_how_ranks_get_equally_many_batches_depends_on_what_makes_them(more: dict[str, Any], words: str) -> None:
    s = job(*(rank(q, loaders=(loader(length=90 + q, **more),)) for q in (0, 1)))
    assert words in only([f for f in data(s, PLAIN) if f.cause == "count"]).advice


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


@pytest.mark.parametrize(
    ("elements", "more"), [(950.0, "; those of rank 1 have 3.5 times as many elements"), (270.0, "")]
)
def test_longer_samples_are_named_where_only_the_first_dimension_is_the_same(elements: float, more: str) -> None:
    sizes = (270.0, elements, 270.0)
    ranks = [rank(q, steps=of_size(8), loaders=(loader(mean_elements=n),)) for q, n in enumerate(sizes)]
    said = [
        x.reason for x in uneven_batches.evaluate(Facts(job(*ranks))) if isinstance(x, Abstained) and x.cause == "size"
    ]
    assert said == [f"all ranks' batches have the same first dimension (samples) in most of their newest steps{more}"]


def test_a_loss_that_is_a_sum_over_samples_weighs_unequal_batches_itself() -> None:
    def losses(xs: tuple[Step, ...], power: float) -> tuple[Step, ...]:
        return tuple(msgspec.structs.replace(x, loss=0.3 * x.batch**power) for x in xs)

    assert of_sizes(losses(of_size(8), 1.0), losses(of_size(2), 1.0)) == []
    assert [f.cause for f in of_sizes(losses(of_size(8), 0.2), losses(of_size(2), 0.2))] == ["size"]


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
        f.message.startswith("rank 0 ran out of batches after 45 at ")
        and "rank 1 cannot go on: rank 0 has no batch left" in f.cost
    )


def test_a_rank_that_is_stuck_in_a_later_batch_did_not_run_out() -> None:
    out, more = loader(length=91, batches=91, exhausted=True), loader(length=100, batches=92)
    waits = Call(op="all_reduce", group="default_pg", seq=7, entered_s=5.0, site=LOOP)
    crashed = {"life": Life.CRASHED, "exception": "RuntimeError: Connection closed by peer", "ended_s": 99.0}
    s = job(
        rank(0, loaders=(out,), life=Life.FINISHED, ended_s=98.0), rank(1, loaders=(more,), calls=(waits,), **crashed)
    )
    f = only(findings(s, deadlock, uneven_batches))
    assert f.message.startswith("rank 0 ran out of batches after 91; rank 1 has had 92 of 100 at ")


def test_what_enters_the_module_is_the_batch_whatever_the_loader_gave() -> None:
    """Rank 0 reads for all and hands out parts; with as many micro-batches of one size, sizes do differ."""

    def found(*entered: tuple[int, int]) -> list[Finding]:
        ranks = [
            rank(q, steps=of_size(30 if q == 0 else 10), loaders=(loader(),),
                 models=(msgspec.structs.replace(MODEL, batch=size, forwards=forwards),))
            for q, (size, forwards) in enumerate(entered)
        ]  # fmt: skip
        return of_kind(data(job(*ranks), None), "uneven_batches")

    assert found((10, 100), (10, 100)) == []
    assert only(found((30, 100), (10, 100))).cause == "size"
    assert only(found((10, 300), (10, 100))).cause == "size", "three micro-batches a step against one"
    assert only(found((0, 100), (0, 100))).cause == "size", "not known"
