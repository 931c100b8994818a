"""Collectives on a device backend, whose hosts leave them before the ranks have met: compared once they are complete."""

from __future__ import annotations

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, Group, RankState, Snapshot
from distdiag.monitor.rows import Collectives


def issued(seq: int, dtype: str = "float32", op: str = "all_reduce") -> tuple[Call, float]:
    call = Call(op=op, group="g", seq=seq, dtype=dtype, shape=(2,), entered_s=1.0, left_s=1.1, completed_s=1.1)
    return replace(call, on_device=True), 0.0


def job(*completed: int) -> Snapshot:
    ranks = {q: RankState(rank=q, completed={"g": n}) for q, n in enumerate(completed)}
    group = Group(name="g", ranks=tuple(range(len(completed))), backend="nccl")
    return Snapshot(t_s=9.0, world_size=len(completed), ranks=ranks, groups={"g": group})


def test_calls_that_differ_are_reported_once_all_devices_have_completed_them() -> None:
    collectives = Collectives()
    collectives.add(0, [issued(1), issued(2), issued(3)])
    collectives.add(1, [issued(1), issued(2, "int64"), issued(3)])
    collectives.compare_on_device(job(2, 1))
    assert collectives.met == []
    collectives.compare_on_device(job(3, 2))
    (met,) = collectives.met
    assert (met.group, met.seq, met.cause) == ("g", 2, "dtype") and set(met.calls) == {0, 1}
    collectives.compare_on_device(job(3, 3))
    assert len(collectives.met) == 1


def test_a_coalesced_group_whose_operations_share_a_number_is_not_judged() -> None:
    collectives = Collectives()
    collectives.add(0, [issued(1), issued(1, "int64")])
    collectives.add(1, [issued(1, "int64"), issued(1)])
    collectives.compare_on_device(job(1, 1))
    assert collectives.met == []


def test_nothing_is_judged_without_counters_or_without_a_member() -> None:
    collectives = Collectives()
    collectives.add(0, [issued(1)])
    collectives.compare_on_device(replace(job(1, 1), ranks={q: RankState(rank=q) for q in (0, 1)}))
    collectives.compare_on_device(job(1, 1))
    assert collectives.met == []
