"""The wait-for graph: which rank waits for which, which ranks are stuck for good, and what computing it costs."""

from __future__ import annotations

import time

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Life, Snapshot
from distdiag.diagnosis.waits import graph
from tests.diagnosis.made import proved
from tests.diagnosis.waits import SAVE, call, rank, snapshot


def test_a_wait_for_a_living_rank_is_not_a_deadlock() -> None:
    s = snapshot(rank(0, call()), rank(1, call()), rank(2, enqueued={"default_pg": 6}, completed={"default_pg": 6}))
    g = graph.build(s)
    assert g.stuck == frozenset()
    assert g.sinks == (2,)
    assert {r: waits[0].missing for r, waits in g.of_rank.items()} == {0: {2}, 1: {2}}
    assert g.victims_of(2) == {0, 1}
    assert proved(s, g) == []


def test_a_collective_issued_by_all_members_is_no_wait() -> None:
    g = graph.build(snapshot(*(rank(r, call()) for r in range(4))))
    assert (g.stuck, g.sinks) == (frozenset(), ())


def test_waits_are_followed_through_other_ranks() -> None:
    """Rank 0 waits for 1 in a pair, 1 waits for 2 in another pair, 2 computes."""
    s = snapshot(
        rank(0, call(group="a", seq=1)), rank(1, call(group="b", seq=1)), rank(2), groups={"a": (0, 1), "b": (1, 2)}
    )
    g = graph.build(s)
    assert g.sinks == (2,)
    assert g.victims_of(2) == {0, 1}


def test_a_call_written_before_its_counter_counts_as_issued() -> None:
    s = snapshot(rank(0, call()), rank(1, call(), enqueued={"default_pg": 6}))
    g = graph.build(s)
    assert {r: waits[0].missing for r, waits in g.of_rank.items()} == {0: set(), 1: set()}


def test_a_call_already_completed_blocks_nobody() -> None:
    s = snapshot(rank(0, call(), completed={"default_pg": 7}), rank(1, life=Life.FINISHED))
    assert graph.build(s).stuck == frozenset()


def test_a_wait_in_an_unknown_group_proves_nothing() -> None:
    s = snapshot(rank(0, call(group="?")), rank(1, life=Life.FINISHED))
    g = graph.build(s)
    assert (g.stuck, g.unknown, g.sinks) == (frozenset(), {0}, ())


def test_a_wait_in_a_group_that_a_rank_has_aborted_proves_nothing() -> None:
    s = snapshot(rank(0, call()), rank(1, life=Life.FINISHED))
    assert graph.build(s).stuck == {0}
    groups = {name: replace(group, unfollowed=True) for name, group in s.groups.items()}
    g = graph.build(replace(s, groups=groups))
    assert (g.stuck, g.unknown, g.sinks) == (frozenset(), {0}, ())


def test_a_wait_for_an_unknown_rank_proves_nothing() -> None:
    s = snapshot(rank(0, call()), rank(1, life=Life.MISSING))
    g = graph.build(s)
    assert (g.stuck, g.sinks) == (frozenset(), (1,))


def wide(n: int) -> Snapshot:
    return snapshot(
        rank(0, call("barrier", 7, SAVE)), *(rank(r, call()) for r in range(1, n // 2)),
        *(rank(r, call(group="g", seq=2)) for r in range(n // 2, n)), groups={"g": tuple(range(n))},
    )  # fmt: skip


def test_cost_is_linear_in_the_number_of_ranks() -> None:
    """1,024 ranks against 128: eight times the work, with a margin for noise; quadratic growth would be 64 times."""
    cost = {}
    for n in (128, 1024):
        s = wide(n)
        best = float("inf")
        for _ in range(7):
            start = time.process_time()
            assert proved(s)
            best = min(best, time.process_time() - start)
        cost[n] = best
    assert cost[1024] < 24 * cost[128]
