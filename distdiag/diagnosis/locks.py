"""File locks across collectives: a rank waits for a lock whose holder waits, in a collective, for that rank.

The kernel's lock table shows who holds a lock. Neither rank can free the other, whatever it does next.
"""

from __future__ import annotations

from typing import NamedTuple

from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.waits.graph import WaitGraph


class LockCycle(NamedTuple):
    """One cycle through a file lock."""

    rank: int  # that waits for the lock
    holders: tuple[int, ...]  # ranks that hold it, and wait for `rank`
    members: tuple[int, ...]  # all ranks that are stuck because of it


def lock_cycles(s: Snapshot, graph: WaitGraph) -> tuple[LockCycle, ...]:
    out = []
    for rank in graph.sinks:
        if rank not in s.ranks:
            continue
        waiting = graph.victims_of(rank)
        holders = tuple(h for h in s.ranks[rank].lock_holders if h in waiting and s.ranks[h].blocked is not None)
        if holders:
            out.append(LockCycle(rank, holders, tuple(sorted({rank, *waiting}))))
    return tuple(out)
