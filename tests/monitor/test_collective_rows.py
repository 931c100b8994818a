"""The rows of completed collectives: times and arrivals on the host, neither on a device."""

from __future__ import annotations

from distdiag.diagnosis.model.snapshot import Call, Group, RankState, Snapshot
from distdiag.monitor.collectives import ARRIVALS_PER_S, Collectives

RANKS = (3, 1, 2)  # in the order of the group


def job(**completed: int) -> Snapshot:
    ranks = {q: RankState(rank=q, completed=completed) for q in RANKS}
    return Snapshot(t_s=9.0, world_size=4, ranks=ranks, groups={"g": Group(name="g", ranks=RANKS, backend="gloo")})


def call(seq: int, entered_s: float, nbytes: int = 8, on_device: bool = False) -> tuple[Call, float]:
    left_s = entered_s + 0.5
    return Call(op="all_reduce", group="g", seq=seq, bytes=nbytes, entered_s=entered_s, left_s=left_s, on_device=on_device), 0.25  # fmt: skip


def test_arrivals_are_in_the_order_of_the_group() -> None:
    collectives = Collectives()
    collectives.add(1, [call(1, 5.010)])
    collectives.add(2, [call(1, 5.000)])
    assert collectives.rows(job(), 7) == [], "rank 3 has not left it yet"
    collectives.add(3, [call(1, 5.0025)])
    (row,) = collectives.rows(job(), 7)
    assert (row.arrivals_us, row.late_rank, row.step, row.t_s) == ("2500,10000,0", 1, 7, 5.0)
    assert row.duration_us == 250_000 and row.skew_us is not None and round(row.skew_us) == 10_000
    (arrival,) = collectives.arrivals
    assert [round(ms, 3) for ms in (arrival.skew_ms, arrival.alone_ms)] == [10.0, 7.5]


def test_arrivals_are_kept_of_some_collectives_of_each_kind() -> None:
    collectives = Collectives()
    period_s = len(RANKS) / ARRIVALS_PER_S
    for rank in RANKS:
        collectives.add(rank, [call(i, 5.0 + i * period_s / 10, 8 if i % 2 else 16) for i in range(40)])
    rows = collectives.rows(job(), 7)
    assert len(rows) == 40
    assert 6 <= sum(r.arrivals_us is not None for r in rows) <= 8, "two sizes, each once per period, for four periods"


def test_what_devices_completed_has_a_row_without_times() -> None:
    collectives = Collectives()
    for rank in RANKS:
        collectives.add(rank, [call(i, 5.0 + rank, on_device=True) for i in (1, 2)])
    (row,) = collectives.rows(job(g=1), 7)
    assert (row.seq, row.op, row.bytes, row.ranks, row.t_s) == (1, "all_reduce", 8, 3, 6.0)
    assert row.duration_us is row.skew_us is row.late_rank is row.arrivals_us is None
    assert not collectives.arrivals, "hosts run ahead: when they issue a call says nothing of who is late"
