"""Finds collectives that all ranks issued and none completed because one rank issued them after the others' timeout.

Dumps record when each rank issued what is in flight. If these times differ by more than the collective's timeout, the first
ranks had given up when the last one issued it. Host clocks differ by less, and equally for earlier collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from distdiag.diagnosis.model.snapshot import Snapshot

BEFORE = 16  # collectives before the oldest in flight, used to compare the hosts' clocks


@dataclass(frozen=True, slots=True)
class LateRanks:
    """Ranks that issued a collective after its timeout."""

    group: str
    seq: int
    since_s: float  # when the first rank had issued it
    timeout_s: float
    late_s: dict[int, float]  # of each late rank: seconds after the first
    others: tuple[int, ...]


def find(snapshot: Snapshot, timeouts_s: Mapping[str, float]) -> LateRanks | None:
    """Return the first collective in flight that a rank issued after its group's timeout; None if there is none."""
    issued: dict[tuple[str, int], dict[int, float]] = {}
    heads: set[tuple[str, int]] = set()
    for rank, state in snapshot.ranks.items():
        heads |= {(g, done + 1) for g, done in state.completed.items() if done < state.enqueued.get(g, 0)}
        for call in state.calls:
            if call.seq is not None and call.entered_s is not None:
                issued.setdefault((call.group, call.seq), {})[rank] = call.entered_s
    found: list[LateRanks] = []
    for key, seq in heads:
        times = issued.get((key, seq), {})
        if len(times) < 2 or key not in timeouts_s:
            continue
        first = min(times, key=lambda q: times[q])
        late: dict[int, float] = {}
        for q, t in times.items():
            pairs = [issued.get((key, n), {}) for n in range(seq - BEFORE, seq)]
            usual = [p[q] - p[first] for p in pairs if q in p and first in p]
            late_s = t - times[first] - (statistics.median(usual) if usual else 0)
            if late_s > timeouts_s[key]:
                late[q] = late_s
        if late and len(late) <= len(times) // 2:
            others = tuple(sorted(set(times) - set(late)))
            found.append(LateRanks(key, seq, times[first], timeouts_s[key], late, others))
    return min(found, key=lambda x: x.since_s, default=None)
