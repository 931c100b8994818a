"""memory: growth, imbalance, and how much is left."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import (
    Snapshot,
)
from distdiag.diagnosis.pauses import Pauses
from distdiag.diagnosis.rules import memory
from tests.diagnosis.made import GIB, findings, job, of_kind, only, rank, steps


def findings_of(s: Snapshot) -> list[Finding]:
    return findings(s, memory)


def test_growth_needs_steady_growth_after_the_first_steps() -> None:
    def grows(per_s: float, until: float = 1e9) -> Snapshot:
        points = tuple((float(t), int(4e8 + per_s * min(t, until))) for t in range(60))
        return job(
            rank(0, memory=points, warm_since_s=5.0),
            rank(1, memory=tuple((t, 400_000_000) for t, _ in points), warm_since_s=5.0),
        )

    f = only([f for f in findings_of(grows(10e6)) if f.cause == "growth"])
    assert f.culprits == (0,)
    assert [f for f in findings_of(grows(10e6, until=20)) if f.cause == "growth"] == []
    assert [f for f in findings_of(grows(1e6)) if f.cause == "growth"] == []


@pytest.mark.parametrize(("per_s", "culprits"), [(8e6, (0, 1)), (3e6, (0,))])
def test_a_rank_that_grows_as_fast_but_less_steadily_has_the_same_fault(
    per_s: float, culprits: tuple[int, ...]
) -> None:
    points = tuple((float(t), int(4e8 + 10e6 * t)) for t in range(60))
    jumps = tuple((t, int(4e8 + per_s * t - 12e6 * (t % 7 == 3))) for t, _ in points)
    s = job(rank(0, memory=points, warm_since_s=5.0), rank(1, memory=jumps, warm_since_s=5.0))
    assert only([f for f in findings_of(s) if f.cause == "growth"]).culprits == culprits


def test_what_grows_within_one_long_step_is_not_kept_across_steps() -> None:
    points = tuple((float(t), int(4e8 + 10e6 * t)) for t in range(60))
    s = job(*(rank(q, memory=points, warm_since_s=5.0, steps=steps(seed=q)) for q in range(2)), t_s=60.0)

    def found(in_step_since_s: float) -> list[Finding]:
        made = tuple(replace(x, end_s=in_step_since_s - (60 - x.step) * 0.1) for x in steps())
        pauses = Pauses()
        pauses.add(replace(s, ranks={q: replace(r, steps=made) for q, r in s.ranks.items()}))
        return [f for f in findings(s, memory, pauses=pauses) if f.cause == "growth"]

    assert found(59.0) and found(50.0) == []


def test_growth_on_a_device_is_reported_with_the_time_left() -> None:
    def grows(per_s: float, seconds: int = 60) -> list[Finding]:
        points = tuple((float(t), int(4e9 + per_s * t)) for t in range(seconds))
        card = {"device_total_bytes": int(80e9), "warm_since_s": 5.0}
        ranks = (rank(0, device_memory=points, **card), rank(1, device_memory=((59.0, 4_000_000_000),), **card))
        return [f for f in findings_of(job(*ranks)) if f.cause == "growth"]

    f = only(grows(100e6))  # 70.1 GB are left, at 100 MB/s
    assert f.culprits == (0,) and f.message.startswith("device memory of rank 0") and "full in 12 minutes" in f.message
    assert grows(1e6) == [] and grows(100e6, seconds=20) == []


def test_growth_on_a_host_is_reported_with_the_time_left() -> None:
    """The more time is left, the longer it is watched: a replay buffer also grows until it is full."""

    def grows(per_s: float, seconds: int, until: float = math.inf) -> list[Finding]:
        points = tuple((1.007 * t, int(4e8 + per_s * min(t, until))) for t in range(seconds))
        ranks = [rank(q, memory=points, warm_since_s=5.0) for q in range(2)]
        return findings_of(job(*ranks, host_available_bytes=int(144e9)))

    assert "full in 2 hours at this rate" in only(grows(10e6, 170)).message  # two ranks, 10 MB/s each
    assert grows(10e6, 100) == []
    assert "full in 3 hours" in only(grows(8e6, 200)).message and grows(8e6, 170) == []
    assert grows(8e6, 200, until=165) == [], "it has been over for most of a minute"
    assert "full in 12 minutes" in only(grows(100e6, 30)).message and grows(100e6, 10) == []


@pytest.mark.parametrize(("seconds", "checked"), [(12, True), (8, False)])
def test_memory_counts_as_checked_once_it_was_watched_for_some_seconds(seconds: int, checked: bool) -> None:
    points = tuple((float(t), 400_000_000) for t in range(seconds))
    why = memory.evaluate(Facts(job(*(rank(q, memory=points, warm_since_s=5.0) for q in range(2)))))
    assert all(x.checked for x in why if isinstance(x, Abstained)) is checked


def test_growth_of_one_rank_only_is_reported_sooner() -> None:
    """A cache or a replay buffer fills on every rank that trains."""

    def grows(per_s: float, *others: float, warm_s: float | None = 2.0, seconds: int = 16) -> list[Finding]:
        rates = (per_s, *others)
        ranks = [
            rank(
                q,
                memory=tuple((float(t), int(3e8 + rate * t)) for t in range(seconds)),
                warm_since_s=2.0 if q == 0 else warm_s,
            )
            for q, rate in enumerate(rates)
        ]
        return findings_of(job(*ranks, host_available_bytes=int(100e9)))

    f = only(grows(30e6, 0.0))
    assert (f.kind, f.cause, f.culprits) == ("memory", "growth", (0,))
    assert only(grows(30e6, 1e6, 0.0)).culprits == (0,)
    assert grows(30e6, 30e6) == [], "both grow, and the host lasts for half an hour"
    assert grows(30e6, 5e6) == [], "the other grows, too"
    assert grows(30e6, 0.0, warm_s=None) == [], "the other does not train: rank 0 learns from what it sends"
    assert grows(30e6, 0.0, seconds=10) == []
    assert grows(7e6, 0.0, seconds=20) == [], "117 MiB so far"
    assert only(grows(7e6, 0.0, seconds=26)).culprits == (0,)
    assert grows(7e6, 7e6, seconds=30) == [], "caches of both ranks may grow as much"


def test_growth_of_workers_is_not_that_of_their_rank() -> None:
    def grows(per_s: float, since: int = 0) -> list[Finding]:
        flat = tuple((float(t), 400_000_000) for t in range(60))
        workers = tuple((float(t), int(8e8 + per_s * t)) for t in range(since, 60))
        return findings_of(
            job(rank(0, memory=flat, worker_memory=workers, warm_since_s=5.0), rank(1, memory=flat, warm_since_s=5.0))
        )

    f = only(grows(10e6))
    assert (f.kind, f.cause, f.culprits, f.severity) == ("memory", "growth", (0,), "warning")
    assert f.message.startswith("host memory of worker processes of rank 0 grows by") and "the dataset" in f.advice
    assert grows(0.0) == [] and grows(10e6, since=50) == [], "other workers than ten seconds ago"


def test_imbalance_is_relative_to_the_hosts_memory() -> None:
    def holds(more: float, host: float) -> list[tuple[int, ...]]:
        ranks = [
            rank(q, memory=tuple((float(t), int(4e8 + (q == 0) * more)) for t in range(30)), warm_since_s=5.0)
            for q in (0, 1)
        ]
        return [f.culprits for f in findings_of(job(*ranks, host_memory_bytes=int(host))) if f.cause == "imbalance"]

    assert holds(1e9, host=24e9) == [(0,)]
    assert holds(0.3e9, host=24e9) == []  # the remains of a file that one rank read for all
    assert holds(1e9, host=500e9) == []


def test_imbalance_must_last_for_some_seconds_however_often_memory_is_sampled() -> None:
    def holds(seconds: float, every_s: float) -> list[tuple[int, ...]]:
        times = [10.0 + i * every_s for i in range(int(seconds / every_s) + 1)]
        ranks = [rank(q, memory=tuple((t, int(4e8 + (q == 0) * 1e9)) for t in times), warm_since_s=5.0) for q in (0, 1)]
        return [f.culprits for f in findings_of(job(*ranks, host_memory_bytes=int(24e9))) if f.cause == "imbalance"]

    assert holds(8.0, every_s=2.0) == [(0,)], "a busy host samples less often"
    assert holds(8.0, every_s=1.0) == [(0,)]
    assert holds(4.0, every_s=0.5) == []
    assert holds(6.0, every_s=6.0) == [], "two samples"


def headroom(*used_gib: float | None, card_gib: float | None = 80.0) -> list[Finding]:
    total = None if card_gib is None else int(card_gib * GIB)
    ranks = [
        rank(q, device_bytes=None if used is None else int(used * GIB), device_total_bytes=total)
        for q, used in enumerate(used_gib)
    ]
    return of_kind(findings_of(job(*ranks)), "memory", "headroom")


def test_a_nearly_full_card_is_reported_with_its_rank() -> None:
    f = only(headroom(40.0, 78.0))
    assert (f.culprits, f.certainty) == ((1,), "proved") and "device memory of rank 1" in f.message
    assert only(headroom(78.0, 78.0)).culprits == (0, 1)


def test_a_card_with_room_or_unknown_size_is_no_finding() -> None:
    assert headroom(40.0, 75.0) == []  # 94 %: tuned to be nearly full
    assert headroom(None, None) == []
    assert headroom(78.0, 78.0, card_gib=None) == []
