"""Finds collectives that all ranks issued and none completed because one rank issued them after the others' timeout.

Dumps record when each rank issued what is in flight. If these times differ by more than the collective's timeout, the first
ranks had given up when the last one issued it. Host clocks differ by less, and equally for earlier collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distdiag.sources.dumps.entries import time_ns
from distdiag.sources.dumps.scan import Scan

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


def find(
    scans: Mapping[int, Iterable[Scan]],
    floor: Mapping[str, int],
    positions: Mapping[int, Mapping[str, tuple[int, int]]],
    t0_ns: int,
) -> LateRanks | None:
    """Return the first collective in flight that a rank issued after its timeout; None if there is none.

    Args:
        scans: The scanned files of each rank.
        floor: The oldest collective in flight on any rank, by group.
        positions: (newest issued, newest completed) of each rank and group.
        t0_ns: Unix time of the run's time zero.
    """
    issued: dict[tuple[str, int], dict[int, int]] = {}
    timeouts_s: dict[str, float] = {}
    since = {group: seq - BEFORE for group, seq in floor.items()}
    for rank, files in scans.items():
        for scan in files:
            for key, seq, e in scan.collectives(since):
                if (t := e.created_ns) is not None:
                    issued.setdefault((key, seq), {}).setdefault(rank, t)
                    if (limit := time_ns(e.timeout_ms)) is not None:
                        timeouts_s[key] = max(timeouts_s.get(key, 0.0), limit / 1e3)
    found: list[LateRanks] = []
    for key, seq in {(g, done + 1) for of_rank in positions.values() for g, (n, done) in of_rank.items() if done < n}:
        times = issued.get((key, seq), {})
        if len(times) < 2 or key not in timeouts_s:
            continue
        first = min(times, key=lambda q: times[q])
        late: dict[int, float] = {}
        for q, t in times.items():
            pairs = [issued.get((key, n), {}) for n in range(seq - BEFORE, seq)]
            usual = [p[q] - p[first] for p in pairs if q in p and first in p]
            late_s = (t - times[first] - (statistics.median(usual) if usual else 0)) / 1e9
            if late_s > timeouts_s[key]:
                late[q] = late_s
        if late and len(late) <= len(times) // 2:
            since_s = (times[first] - t0_ns) / 1e9
            found.append(LateRanks(key, seq, since_s, timeouts_s[key], late, tuple(sorted(set(times) - set(late)))))
    return min(found, key=lambda x: x.since_s, default=None)
