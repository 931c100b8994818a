"""duplicate_data: ranks or epochs with the same batches."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch

from distdiag.diagnosis.engine import Checks
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import Call, Group, Loader, RankState, Sample, Site, Snapshot
from distdiag.diagnosis.rules import duplicate_data
from distdiag.recorder import unseen
from distdiag.recorder.hooks.epoch_samples import EpochSamples
from tests.diagnosis.made import MODEL, findings, job, loader, of_kind, only, rank, steps


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    unseen.install()  # else no tensor has memory that may be read


def data(s: Snapshot, source: str | None) -> list[Finding]:
    return findings(s, duplicate_data, source=lambda _: source)


PLAIN = "def main():\n    for x, y in loader:\n        step(x, y)\n"


def prints(seed: int) -> tuple[int, ...]:
    r = random.Random(seed)
    return tuple(r.getrandbits(64) | 1 << 40 | 1 for _ in range(6))


def duplicates(a: Loader, b: Loader) -> list[Finding]:
    return [f for f in data(job(rank(0, loaders=(a,)), rank(1, loaders=(b,))), PLAIN) if f.kind == "duplicate_data"]


def test_the_same_batches_on_two_ranks_are_reported() -> None:
    f = only(duplicates(loader(first_fingerprints=prints(1)), loader(first_fingerprints=prints(1))))
    assert f.cause == "same_batches_on_ranks" and f.victims == (0, 1)
    assert duplicates(loader(first_fingerprints=prints(1)), loader(first_fingerprints=prints(2))) == []
    streams = [loader(first_fingerprints=prints(1), dataset_length=None, length=None, distributed_sampler=False)] * 2
    assert "split by rank and worker where the data are read" in only(duplicates(*streams)).advice, (
        "it may be iterable: no sampler"
    )


@pytest.mark.parametrize(
    ("seeds", "epochs", "what"),
    [
        ((0, 1), (3, 3), "seed is 0 on rank 0, 1 on rank 1"),
        ((7, 7), (0, 3), "epoch is 0 on rank 0, 3 on rank 1"),
        ((7, 7), (3, 3), ""),
    ],
)
def test_samplers_that_shuffle_differently_are_reported(
    seeds: tuple[int, ...], epochs: tuple[int, ...], what: str
) -> None:
    def found(**more: object) -> list[Finding]:
        common = {"distributed_sampler": True, "shuffle": True, "dataset_length": 100, "iterations_started": 4} | more
        rows = zip(seeds, epochs, strict=True)
        both = [
            loader(first_fingerprints=prints(q), sampler_seed=seed, sampler_epoch=epoch, **common)
            for q, (seed, epoch) in enumerate(rows)
        ]
        return duplicates(*both)

    of = found()
    assert [f.cause for f in of] == ["parts_overlap"] * bool(what)
    if what:
        assert what in of[0].message and "some samples are in none" in of[0].message
    assert found(shuffle=False) == []


@pytest.mark.parametrize(
    ("index", "more", "words"),
    [
        ((5, 6, 7), {}, "the ranks have 3 different ones"),
        ((5, 5, 6), {}, "and rank 2 not that of the others"),
        ((5, 5, 5), {}, ""),
        ((5, 6, 0), {}, ""),  # one is not known
        ((5, 6, 7), {"sampler_fits": False}, ""),  # each rank has its own sampler, of one replica
        ((5, 6, 7), {"distributed_sampler": False}, ""),
    ],
)
@pytest.mark.parametrize("split", [True, False])
def test_ranks_that_split_different_data_sets_are_reported(
    index: tuple[int, ...], more: dict[str, object], words: str, split: bool
) -> None:
    common = {
        "distributed_sampler": True,
        "sampler_fits": True,
        "shuffle": True,
        "sampler_seed": 0,
        "dataset_length": 100,
    } | more

    def found(epochs: tuple[int, ...]) -> list[Finding]:
        of = [
            loader(first_fingerprints=prints(q), data_set_index=x and x | split << 33, iterations_started=e, **common)
            for q, (x, e) in enumerate(zip(index, epochs, strict=True))
        ]
        return data(job(*(rank(q, loaders=(x,)) for q, x in enumerate(of))), PLAIN)

    of = found((1, 1, 1))
    assert [(f.cause, f.severity) for f in of] == [("same_batches_on_ranks", "warning")] * bool(words)
    if words:
        assert words in of[0].message and ("random_split" in str(of[0].advice)) is split is ("validation" in of[0].cost)
    assert found((1, 1, 2)) == [], "it may be another one in each epoch"


def hashed(samples: Iterable[int]) -> tuple[int, ...]:
    """Return what a rank keeps of an epoch of these samples."""
    times = Counter(zlib.crc32(str(x).encode()) for x in samples)
    return tuple(key << 32 | times[key] for key in sorted(times)[:32])


R = random.Random(1)
PART = R.sample(range(3200), 3200)
WITH_REPEATS = R.choices(range(400), k=3200)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((range(3200), PART), "ranks 0, 1 read the same samples in an epoch"),
        ((WITH_REPEATS, WITH_REPEATS[::-1]), "ranks 0, 1 read the same samples"),
        ((PART, PART[:3000]), "ranks 0, 1 read the same samples"),
        ((range(1600), range(1600, 3200), PART[:1600]), "the parts of the data that the ranks read in an epoch overlap"),
        ((range(800), range(800), range(800, 1600), range(800, 1600)), "ranks 0, 1 read the same samples in an epoch"),
        ((PART[::2], PART[1::2]), ""),
        ((WITH_REPEATS[::2], WITH_REPEATS[1::2]), ""),
        ((R.choices(PART, k=3200), R.choices(PART, k=3200)), ""),
        ((R.choices(PART, k=1600), R.choices(PART, k=1600)), ""),
        (([*PART[::2], PART[1]], PART[1::2]), ""),
    ],
    ids=["all", "all, with repeats", "the last ones dropped", "overlap", "two parts for four", "parts", "parts, with repeats",
         "drawn with replacement", "half drawn with replacement", "padded"],
)  # fmt: skip
def test_ranks_that_read_the_same_samples_in_any_order_are_reported(
    parts: tuple[Iterable[int], ...], words: str
) -> None:
    def found(epochs: tuple[int, ...]) -> list[Finding]:
        rows = zip(range(4), epochs, parts, strict=False)
        of = [loader(first_fingerprints=prints(q), sampled_epoch=e, epoch_samples=hashed(x)) for q, e, x in rows]
        return data(job(*(rank(q, loaders=(x,)) for q, x in enumerate(of))), PLAIN)

    of = found((1, 1, 1, 1))
    assert len(of) == bool(words) and (not words or words in of[0].message)
    if "overlap" in words:
        assert (of[0].severity, of[0].certainty) == ("info", "suspected")
    elif words:
        assert (of[0].severity, of[0].cause) == ("warning", "same_batches_on_ranks") and "2 times" in of[0].cost
        assert ("so do ranks 2, 3" in of[0].message) is (len(parts) == 4)
    assert found((1, 2, 1, 1)) == [], "epochs are compared with themselves only"


def streamed(r: random.Random, kind: str, workers: int, *, batch: int = 8, batches: int = 30) -> list[list[list[int]]]:
    """Return the batches that each worker of one rank makes of a stream."""
    n = batch * batches * workers
    data = r.sample(range(1 << 20), n)
    if kind == "all, in one order":
        of = [data] * workers
    elif kind == "all, each in its order":
        of = [r.sample(data, n) for _ in range(workers)]
    elif kind == "begins again":  # as often as there are workers
        of = [data[w::workers] * workers for w in range(workers)]
    elif kind == "each sample several times":
        of = [[x for x in data[w::workers] for _ in range(workers)] for w in range(workers)]
    elif kind == "each batch several times":
        cut = [data[w::workers] for w in range(workers)]
        of = [[x for i in range(0, len(c), batch) for _ in range(workers) for x in c[i : i + batch]] for c in cut]
    elif kind == "drawn with replacement":
        of = [r.choices(data, k=n // workers) for _ in range(workers)]
    elif kind == "one constant":
        of = [[7] * n] * workers
    elif kind == "uneven parts that begin again":
        of = [data[: n // 4] * workers, *[data[n // 4 :][w :: workers - 1] * workers for w in range(workers - 1)]]
    else:
        of = [data[w::workers] for w in range(workers)]
    return [[samples[i : i + batch] for i in range(0, len(samples) - batch + 1, batch)] for samples in of]


@pytest.mark.parametrize(
    ("kind", "by_first", "by_epoch"),
    [
        ("all, in one order", True, True),
        ("all, each in its order", False, True),
        *[
            (kind, False, False)
            for kind in ("begins again", "each sample several times", "each batch several times", "drawn with replacement",
                         "one constant", "uneven parts that begin again", "parts")
        ],
    ],
)  # fmt: skip
def test_ways_in_which_workers_read_a_stream_are_told_apart(kind: str, by_first: bool, by_epoch: bool) -> None:
    """The class of mutations for samples that each worker gives."""
    r, wrong = random.Random(kind), []
    for _ in range(40):
        workers, ended = r.choice((2, 3, 4, 8)), r.random() < 0.5
        ranks = []
        for q in range(2):
            turns = itertools.zip_longest(*streamed(r, kind, workers))  # a worker that has ended is left out
            given = [batch for turn in turns for batch in turn if batch]
            hashes = EpochSamples(workers)
            for batch in given:
                hashes.add(torch.tensor(batch))
            mine = [key << 32 | times for key, times in hashes.times.items()] if len(hashes.times) == 32 else ()
            first = tuple(zlib.crc32(repr(batch).encode()) << 32 for batch in given[:6])
            of = loader(
                first_fingerprints=first, dataset_length=None, length=None, workers=workers, distributed_sampler=False,
                sampled_epoch=int(ended), epoch_samples=tuple(mine) if ended else (),
            )  # fmt: skip
            ranks.append(rank(q, loaders=(of,)))
        found = [f for f in data(job(*ranks), PLAIN) if f.cause == "same_samples_from_workers"]
        expected = (by_first and workers <= 4) or (by_epoch and ended)
        if [f.victims for f in found] != [(0, 1)] * expected:
            wrong.append((workers, ended, [f.message for f in found]))
    assert not wrong


def test_streams_that_neither_ranks_nor_workers_split_are_reported_as_both() -> None:
    first = tuple(x for x in prints(1)[:3] for _ in range(2))
    stream = loader(first_fingerprints=first, dataset_length=None, length=None, workers=2, distributed_sampler=False)
    assert [f.cause for f in duplicates(stream, stream)] == ["same_samples_from_workers", "same_batches_on_ranks"]
    of_a_data_set = msgspec.structs.replace(stream, dataset_length=900)
    assert duplicates(of_a_data_set, of_a_data_set) == [], "a sampler repeats its indices on purpose"


def plan(r: random.Random, kind: str, ranks: int) -> list[list[int]]:
    """Return the samples that each rank reads in an epoch."""
    n = r.randrange(ranks * 40, ranks * 900)
    data = r.sample(range(1 << 20), n)
    if kind == "all, each in its order":
        return [r.sample(data, n - r.randrange(n // 20 + 1)) for _ in range(ranks)]
    if kind == "parts for half of the ranks":
        parts = [data[q :: ranks // 2] for q in range(ranks // 2)]
        return [r.sample(parts[q // 2], len(parts[q // 2])) for q in range(ranks)]
    if kind == "parts that overlap":
        size = n // ranks
        return [[data[i % n] for i in range(q * size // 2, q * size // 2 + size)] for q in range(ranks)]
    if kind == "each rank shuffles for itself":
        return [r.sample(data, n)[q::ranks] for q in range(ranks)]
    if kind == "drawn with replacement":
        size = n if r.random() < 0.5 else n // ranks
        return [r.choices(data, k=size) for _ in range(ranks)]
    if kind == "parts of data with repeats":
        data = r.choices(data[: max(40, n // 3)], k=n)
    r.shuffle(data)
    data += data[: -n % ranks] if kind == "padded" else []
    return [data[q::ranks] for q in range(ranks)]


@pytest.mark.parametrize(
    ("kind", "severity"),
    [
        ("all, each in its order", "warning"),
        ("parts for half of the ranks", "warning"),
        ("parts that overlap", "info"),
        ("each rank shuffles for itself", "info"),
        ("drawn with replacement", ""),
        ("parts of data with repeats", ""),
        ("parts", ""),
        ("padded", ""),
    ],
)
def test_ways_to_read_an_epoch_are_told_apart(kind: str, severity: str) -> None:
    """The class of mutations for `same_samples` and `some_samples`: what each rank reads, for many sizes and ranks."""
    r, wrong = random.Random(kind), []
    for _ in range(60):
        ranks = r.choice((2, 4, 8)) if "half" not in kind else r.choice((4, 8))
        read = plan(r, kind, ranks)
        slots = [hashed(x) for x in read]
        if min(map(len, slots)) < 32:
            continue
        of = [loader(first_fingerprints=prints(q), sampled_epoch=1, epoch_samples=x) for q, x in enumerate(slots)]
        found = data(job(*(rank(q, loaders=(x,)) for q, x in enumerate(of))), PLAIN)
        if [f.severity for f in found] != [severity] * bool(severity):
            wrong.append((ranks, len(read[0]), [f.message for f in found]))
    assert len(wrong) <= (3 if severity else 0), wrong


@pytest.mark.parametrize("by_index", [1 << 32, 0])
@pytest.mark.parametrize(("length", "severity"), [(1600, "warning"), (9600, "info")])
def test_parts_that_overlap_are_a_warning_if_they_are_as_many_samples_as_the_data_set_has(
    length: int, severity: str, by_index: int
) -> None:
    r = random.Random(3)
    read = [hashed(r.sample(PART[:1600], 1600)[q::2]) for q in range(2)]
    of = [loader(first_fingerprints=prints(q), sampled_epoch=1 | by_index, epoch_samples=x, length=100, batch_size=8, dataset_length=length)
          for q, x in enumerate(read)]  # fmt: skip
    f, *checks = duplicate_data.evaluate(
        Facts(job(*(rank(q, loaders=(x,)) for q, x in enumerate(of))), source=lambda _: PLAIN)
    )
    assert checks == [Abstained("", checked=True, cause="same_batches_on_ranks")]
    assert (
        isinstance(f, Finding)
        and (f.cause, f.severity) == ("parts_overlap", severity)
        and " of 32 that were compared) are" in f.message
    )
    assert ("and as many or more by none" in f.message) is (severity == "warning")
    assert ("if the data set has no sample twice" in f.message) is (severity == "warning" and not by_index)


@pytest.mark.parametrize(("by_index", "checked"), [(1 << 32, True), (0, False)])
def test_values_of_samples_that_differ_are_no_proof_of_other_samples(by_index: int, checked: bool) -> None:
    of = [
        loader(first_fingerprints=prints(q), sampled_epoch=1 | by_index, epoch_samples=hashed(PART[q::2]))
        for q in range(2)
    ]
    s = job(*(rank(q, loaders=(x,)) for q, x in enumerate(of)))
    assert [
        x.checked for x in duplicate_data.evaluate(Facts(s, source=lambda _: PLAIN)) if isinstance(x, Abstained)
    ] == [checked]


@pytest.mark.parametrize(("fits", "judged"), [(True, True), (None, False)])
def test_samples_count_as_compared_if_they_were_or_a_sampler_splits_them(fits: bool | None, judged: bool) -> None:
    more = {"distributed_sampler": fits is not None, "sampler_fits": fits}
    s = job(*(rank(q, loaders=(loader(first_fingerprints=prints(q), **more),)) for q in range(2)))
    found = [*duplicate_data.evaluate(Facts(s, source=lambda _: PLAIN))]
    assert [x.cause for x in found] == [] if judged else ["same_batches_on_ranks"]


@pytest.mark.parametrize("rows", [(0, 1), (1, 0), (0, 2), (0, 3), (0, 1, 2)])
def test_batches_that_a_rank_gets_some_steps_before_another_are_the_same(rows: tuple[int, ...]) -> None:
    every = prints(1) + prints(2)
    stream = {"dataset_length": None, "length": None, "distributed_sampler": False}
    ranks = [rank(q, loaders=(loader(first_fingerprints=every[k : k + 6], **stream),)) for q, k in enumerate(rows)]
    f = only(of_kind(data(job(*ranks), PLAIN), "duplicate_data"))
    late = "rank 1" if rows[0] > rows[1] else "rank 0"
    assert f.victims == tuple(range(len(rows))) and "islice" in f.advice
    assert f"{late} {abs(rows[1] - rows[0])} step" in f.message


@pytest.mark.parametrize("fits", [True, None])
def test_samples_with_equal_values_that_a_sampler_splits_are_other_samples(fits: bool | None) -> None:
    """The values of `i % 7` come again in the next rank's part, one step earlier."""
    every = prints(1) + prints(2)
    split = {"distributed_sampler": True, "sampler_fits": fits}
    ranks = [rank(q, loaders=(loader(first_fingerprints=every[q : q + 6], **split),)) for q in range(2)]
    assert bool(of_kind(data(job(*ranks), PLAIN), "duplicate_data")) == (not fits)


def test_two_batches_in_common_are_not_the_same_data() -> None:
    every = prints(1) + prints(2)
    assert duplicates(*(loader(first_fingerprints=every[k : k + 6]) for k in (0, 4))) == []


@pytest.mark.parametrize(
    ("entered", "losses", "reported"),
    [(32, (1.0, 2.0), False), (32, (1.0, 1.0), True), (64, (1.0, 2.0), True), (20, (1.0, 2.0), False)],
)
def test_ranks_that_each_take_a_part_of_the_same_batch_do_not_train_on_the_same_data(
    entered: int, losses: tuple[float, float], reported: bool
) -> None:
    same = loader(first_fingerprints=prints(1), batch_size=64)
    model = msgspec.structs.replace(MODEL, batch=entered)
    ranks = []
    for q, loss in enumerate(losses):
        made = tuple(msgspec.structs.replace(x, loss=loss / x.step) for x in steps(seed=q))
        ranks.append(rank(q, loaders=(same,), models=(model,), steps=made))
    assert bool(of_kind(data(job(*ranks), PLAIN), "duplicate_data")) is reported


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


@pytest.mark.parametrize(
    ("later", "other", "said"),
    [
        (prints(2), prints(2), "train on the same batches"),
        (prints(2)[:4], prints(2)[:4], "too few later ones"),  # a short test
        (prints(2)[:1] * 6, prints(2)[:1] * 6, "too few later ones"),  # a few batches in turn
        (prints(2), prints(3), None),
        (prints(2), prints(2)[:5], "train on the same batches"),
    ],
)
def test_later_inputs_decide_what_is_said_of_equal_ones(
    later: tuple[int, ...], other: tuple[int, ...], said: str | None
) -> None:
    """It is never a warning: synthetic data in a test or benchmark are often equal on purpose."""
    a, b = (
        loader(fed=True, length=None, iterations_started=1, first_fingerprints=prints(1), previous_fingerprints=x)
        for x in (later, other)
    )
    of = duplicates(a, b)
    assert [f.severity for f in of] == (["info"] if said else [])
    assert said is None or said in of[0].message


def test_ranks_of_smaller_groups_that_are_used_may_share_batches() -> None:
    """Tensor-parallel ranks read the same batches by design; a mesh also makes groups that nobody uses."""
    same = (loader(first_fingerprints=prints(1)),)

    def of_four(**made: int) -> list[Finding]:
        s = job(*(rank(q, loaders=same, enqueued=made) for q in range(4)))
        half = Group(name="half", ranks=(0, 1), backend="gloo")
        return of_kind(data(msgspec.structs.replace(s, groups={**s.groups, "half": half}), PLAIN), "duplicate_data")

    assert of_four(half=1) == []
    assert only(of_four(default_pg=1, half=0)).victims == (0, 1, 2, 3)


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


def test_the_order_of_passes_counts_as_checked_once_two_could_be_compared() -> None:
    """A shuffling sampler whose epoch changes: the first pass, the begin of the second, and that of the third."""
    checks = Checks()

    def reason(**more: Any) -> tuple[bool, str]:
        shuffled = (loader(distributed_sampler=True, shuffle=True, **more) for _ in range(2))
        checks.take(
            "duplicate_data",
            [*duplicate_data.evaluate(Facts(job(*(rank(q, loaders=(x,)) for q, x in enumerate(shuffled)))))],
        )
        return next((x.checked, x.reason) for x in checks.all if x.cause == "same_order_every_epoch")

    assert reason(first_fingerprints=prints(1)) == (False, "no second pass over the data has begun")
    second = {"iterations_started": 2, "sampler_epoch": 1, "previous_fingerprints": prints(1)}
    checked, why = reason(**second)
    assert not checked and "no fingerprints yet" in why
    third = {"iterations_started": 3, "sampler_epoch": 2, "previous_fingerprints": prints(2)}
    for more in (second | {"first_fingerprints": prints(2)}, third):
        assert reason(**more) == (True, "a pass over the data began with other batches than the one before")


@pytest.mark.parametrize("epoch", [0, 2])
def test_passes_of_one_epoch_number_do_not_prove_that_set_epoch_is_missing(epoch: int) -> None:
    """It may be called once for several passes over the loader."""
    same = {"first_fingerprints": prints(1), "previous_fingerprints": prints(1)}
    x = loader(distributed_sampler=True, shuffle=True, iterations_started=9, sampler_epoch=epoch, **same)
    found = data(job(*(rank(q, loaders=(x,)) for q in (0, 1))), PLAIN)
    f = only([f for f in found if f.cause == "same_order_every_epoch"])
    assert (
        f"which is {epoch} in both" in f.message and "before each pass" in f.advice and "every epoch" not in f.message
    )


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
    # a new sampler for each task, whose labels are too few to identify a batch
    fresh = {"shuffle": True, "distributed_sampler": True, "iterations_started": 5, "sampler_epoch": 0}
    few = [loader(first_fingerprints=(1, 2, 3, 4), previous_fingerprints=(5, 6, 7, 8), **fresh)] * 2
    assert [f for f in duplicates(*few) if f.cause == "same_order_every_epoch"] == []


def test_ranks_that_share_their_batches_in_pairs_are_named_in_pairs() -> None:
    mine = {"dataset_length": 640, "distributed_sampler": False}
    loaders = [loader(first_fingerprints=prints(1 + q // 2), **mine) for q in range(4)]
    s = job(*(rank(q, loaders=(x,)) for q, x in enumerate(loaders)))
    f = only([f for f in data(s, PLAIN) if f.kind == "duplicate_data"])
    assert "ranks 0, 1 train on the same batches" in f.message and f.message.endswith(", and so do ranks 2, 3")
    assert "4 ranks get 2 different parts of the data" in f.advice and f.cost.startswith(
        "2 of 4 ranks train on what another"
    )


def test_a_batch_without_a_fingerprint_does_not_hide_that_the_others_are_the_same() -> None:
    """A first batch of few tokens identifies nothing, on no rank that gets it."""
    some = (prints(1)[0], 0, *prints(1)[2:])
    assert only(duplicates(*[loader(first_fingerprints=some)] * 2)).victims == (0, 1)
    assert duplicates(loader(first_fingerprints=some), loader(first_fingerprints=prints(1))) == []
    assert duplicates(*[loader(first_fingerprints=(0, 0, *prints(1)[:2]))] * 2) == []


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


@pytest.mark.parametrize(("fits", "advice"), [(True, "seed NumPy"), (False, "the right rank and number of ranks")])
def test_equal_batches_from_a_correct_sampler_come_from_the_dataset(fits: bool, advice: str) -> None:
    prints = tuple(n << 32 | n for n in range(1, 7))
    same = loader(distributed_sampler=True, sampler_fits=fits, first_fingerprints=prints)
    f = only(findings(job(rank(0, loaders=(same,)), rank(1, loaders=(same,))), duplicate_data))
    assert f.cause == "same_batches_on_ranks" and advice in f.advice


def test_what_has_no_fingerprint_is_not_claimed_to_be_checked() -> None:
    def checked(*found: tuple[int, ...]) -> bool:
        s = job(*(rank(q, loaders=(loader(first_fingerprints=x),)) for q, x in enumerate(found)))
        outcomes = duplicate_data.evaluate(Facts(s, source=lambda _: PLAIN))
        return not any(isinstance(x, Abstained) and not (x.checked or x.cause) for x in outcomes)

    assert checked(prints(1), prints(2))
    assert not checked(prints(1), (0, 0, 0))
    assert not checked(prints(1), prints(2)[:2])


def test_ranks_whose_first_batches_are_still_to_come_are_waited_for() -> None:
    def ranks(*found: tuple[int, ...]) -> list[tuple[int, ...]]:
        s = job(*(rank(q, loaders=(loader(first_fingerprints=x),)) for q, x in enumerate(found)))
        return [f.victims or f.culprits for f in findings(s, duplicate_data)]

    assert ranks(prints(1), prints(1)[:1], prints(1)) == []
    assert ranks(prints(1), prints(1), prints(1)) == [(0, 1, 2)]
    assert ranks(prints(1), (0, 0, 0), prints(1)) == [(0, 2)]  # they have none


def by_hand(q: int, losses: list[float], share: float = 1.0) -> RankState:
    """Return a rank without a loader, which averages its gradients itself."""
    each = tuple(msgspec.structs.replace(x, loss=loss) for x, loss in zip(steps(n=len(losses)), losses, strict=True))
    return rank(q, models=(), steps=each, samples=(Sample("reduced", 8, share),))


def test_ranks_that_average_gradients_and_always_have_equal_losses_train_on_the_same_batches() -> None:
    mine, other = [k / 7 for k in range(20)], [k / 7 + (k == 12) for k in range(20)]
    found = only(data(job(by_hand(0, mine), by_hand(1, mine)), None))
    assert (found.cause, found.severity, found.certainty) == ("same_batches_on_ranks", "info", "suspected")
    assert data(job(by_hand(0, mine), by_hand(1, other)), None) == []
    assert data(job(by_hand(0, [0.0] * 20), by_hand(1, [0.0] * 20)), None) == []
    # the ranks split a module: what they reduce are activations
    assert data(job(by_hand(0, mine, 3.0), by_hand(1, mine, 3.0)), None) == []


EXCHANGE = Site("/job/model.py", 29, "forward")


@pytest.mark.parametrize(
    ("op", "n_bytes", "times", "vetoed"),
    [
        ("all_to_all_single", 8192, 200, True),
        ("recv", 8192, 200, True),  # a ring
        ("recv", 8, 200, False),  # a metric
        ("all_to_all_single", 8192, 3, False),  # not in each step: between epochs, say
        ("all_gather", 8192, 200, False),  # the features of a contrastive loss
    ],
)
@pytest.mark.parametrize("in_order", [True, False])
def test_ranks_that_exchange_data_within_a_step_may_read_the_same_batches(
    op: str, n_bytes: int, times: int, vetoed: bool, in_order: bool
) -> None:
    """Ranks that split sequences or tables, all of them in one group: each takes its part after the loader."""
    samples = {"sampled_epoch": 1 << 32 | 1, "epoch_samples": hashed(range(99))}
    same = loader(**({"first_fingerprints": prints(1)} if in_order else samples))
    call = Call(op=op, group="default_pg", bytes=n_bytes, site=EXCHANGE, entered_s=1.0)
    made = {"loaders": (same,), "steps": steps(), "calls": (call,), "sites": {EXCHANGE.key: times}}
    outcomes = list(duplicate_data.evaluate(Facts(job(*(rank(q, **made) for q in range(2))))))
    assert any(isinstance(x, Finding) for x in outcomes) is not vetoed
    reasons = [x.reason for x in outcomes if isinstance(x, Abstained) and not x.checked]
    assert not vetoed or any(f"{op} at model.py:29" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("shape", "n_bytes", "times", "losses", "severity"),
    [
        ((16,), 64, 200, (0.0, 0.5), "info"),  # rewards
        ((16,), 64, 200, (0.0, 0.0), "warning"),  # a loss per sample, for the log
        ((16,), 64, 2, (0.0, 0.5), "warning"),  # not with each batch
        ((16, 32), 2048, 200, (0.0, 0.5), "warning"),  # the features of a contrastive loss
        ((1,), 4, 200, (0.0, 0.5), "warning"),
    ],
)
def test_ranks_that_make_samples_of_their_own_may_get_the_same_batches(
    shape: tuple[int, ...], n_bytes: int, times: int, losses: tuple[float, ...], severity: str
) -> None:
    call = Call(op="all_gather", group="default_pg", bytes=n_bytes, shape=shape, site=EXCHANGE, entered_s=1.0)
    ranks = []
    for q, more in enumerate(losses):
        of_rank = tuple(msgspec.structs.replace(x, loss=x.step + more) for x in steps())
        same = loader(
            first_fingerprints=prints(1), distributed_sampler=False, batch_size=16, batches=50, dataset_length=9999
        )
        ranks.append(rank(q, loaders=(same,), steps=of_rank, calls=(call,), sites={EXCHANGE.key: times}))
    f = only(data(job(*ranks), PLAIN))
    assert (f.cause, f.severity) == ("same_batches_on_ranks", severity) and "DistributedSampler" in f.advice


@pytest.mark.parametrize(("key", "vetoed"), [(7, True), (5, False)])
def test_ranks_with_other_parameters_outside_ddp_may_read_the_same_batches(key: int, vetoed: bool) -> None:
    ranks = (
        rank(q, loaders=(loader(first_fingerprints=prints(1)),), samples=(Sample("outside_ddp", 2, 1.0, k),))
        for q, k in enumerate((5, key))
    )
    assert (data(job(*ranks), PLAIN) == []) is vetoed


@pytest.mark.parametrize(("since_s", "vetoed"), [(6.05, True), (5.0, False)])
def test_calls_of_a_part_of_a_step_do_not_show_that_no_data_are_exchanged(since_s: float, vetoed: bool) -> None:
    """Of a step with hundreds of calls only the newest are known; those at the line before them may be any."""
    known = Site("/job/train.py", 9, "main")
    call = Call(op="all_reduce", group="default_pg", bytes=8192, site=known, entered_s=since_s)
    made = {"steps": steps(), "calls": (call,), "sites": {known.key: 200, EXCHANGE.key: 200}}
    ranks = (rank(q, loaders=(loader(first_fingerprints=prints(1)),), **made) for q in range(2))
    assert (data(job(*ranks), PLAIN) == []) is vetoed


@pytest.mark.parametrize(
    ("op", "n_bytes", "at_s", "vetoed"),
    [
        ("all_gather", 8192, 1.0, True),
        ("all_to_all_single", 8192, 1.0, True),
        ("broadcast", 8192, 1.0, True),
        ("all_gather", 8, 1.0, False),  # a metric
        ("all_reduce", 8192, 1.0, False),  # the gradients
        ("broadcast", 8192, 0.1, False),  # before the first step
    ],
)
def test_equal_losses_of_exchanged_tensors_do_not_show_equal_batches(
    op: str, n_bytes: int, at_s: float, vetoed: bool
) -> None:
    """A contrastive loss over the features of all ranks."""
    call = Call(op=op, group="default_pg", seq=9, bytes=n_bytes, entered_s=at_s)
    ranks = [msgspec.structs.replace(by_hand(q, [k / 7 for k in range(20)]), calls=(call,)) for q in range(2)]
    outcomes = list(duplicate_data.evaluate(Facts(job(*ranks))))
    reasons = [x.reason for x in outcomes if isinstance(x, Abstained)]
    assert [isinstance(x, Finding) for x in outcomes] == [not vetoed]
    assert not vetoed or op in reasons[0]


@pytest.mark.parametrize(
    ("epoch", "moved", "reported"), [(3, False, True), (3, True, False), (None, False, False), (0, False, False)]
)
def test_a_data_set_whose_workers_keep_its_first_epoch_is_reported(
    epoch: int | None, moved: bool, reported: bool
) -> None:
    def of(q: int) -> Loader:
        return loader(
            first_fingerprints=prints(q), previous_fingerprints=prints(q + 9 * moved), distributed_sampler=False,
            sampler_epoch=epoch, dataset_length=None, iterations_started=4,
        )  # fmt: skip

    found = data(job(*(rank(q, loaders=(of(q),)) for q in range(2))), PLAIN)
    assert [f.cause for f in found] == ["same_order_every_epoch"] * reported
    assert not reported or "its epoch is 3" in found[0].message
