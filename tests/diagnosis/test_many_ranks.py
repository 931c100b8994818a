"""The work of judging thousands of ranks grows with their number, not with its square."""

from __future__ import annotations

import sys

from distdiag.diagnosis.engine import Diagnosis
from distdiag.diagnosis.model.snapshot import Call, Group, Life, RankState, Site, Snapshot

SITE = Site("/job/train.py", 10, "main")


def events(world: int) -> int:
    """Return how many functions are called in a poll in which the ranks of one node wait, and no other rank yet."""
    ranks = {}
    for q in range(world):
        waits = q < 8
        call = Call(op="all_reduce", group="default_pg", seq=100, site=SITE, entered_s=50.0) if waits else None
        ranks[q] = RankState(
            rank=q, node=q // 8, life=Life.RUNNING, step=100, phase="forward", blocked=call,
            activity="waiting" if waits else "user_code", user_stack=(SITE,), current_site=SITE,
            enqueued={"default_pg": 100 if waits else 99}, completed={"default_pg": 99},
        )  # fmt: skip
    group = Group(name="default_pg", ranks=tuple(range(world)), backend="nccl")
    diagnosis, count = Diagnosis(lambda file: None), 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    for t in (51.0, 51.5, 56.0):
        snapshot = Snapshot(t_s=t, world_size=world, ranks=ranks, groups={group.name: group})
        sys.setprofile(counted)
        try:
            diagnosis.update(snapshot)
        finally:
            sys.setprofile(None)
    return count


def test_a_poll_that_sees_the_begin_of_a_hang_is_linear_in_the_ranks() -> None:
    events(16)  # what is done once
    assert events(1024) < 6 * events(256)
