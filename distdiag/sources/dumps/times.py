"""Times from dumps: when each was taken, how long its rank has paused, and which ranks issued a collective after its timeout.

Dumps record when each rank issued what is in flight. If these times differ by more than the collective's timeout, the first
ranks had given up when the last one issued it. Host clocks differ by less, and equally for earlier collectives.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.entries import Entry, time_ns

GAPS_SEEN = 3  # number of pauses of a length after which a rank is expected to pause that long again
GAP_ENTRIES = 200  # newest entries that are examined
BEFORE = 16  # collectives before the oldest in flight, used to compare the hosts' clocks
DUMPED_WITHIN_S = 300.0  # after the timeout; a later file time may be that of a copy


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one rank's dump in seconds since the oldest entry of all; None if not known."""

    oldest_s: float | None = None  # entry
    newest_s: float | None = None  # entry
    written_s: float | None = None  # its file; a copy is written later
    moved_s: float | None = None  # found operations complete that the watchdog (10 times a second) had not retired yet
    asked_s: float | None = None  # found operations begun and not completed: it was taken at this time or later
    usual_gap_s: float = 0.0  # length of its repeated pauses


def span_ns(files: Collection[DumpFile]) -> tuple[int, int] | None:
    """Return when the oldest and the newest entry were created; None if that is not known."""
    times = [t for f in files for e in f.entries[:1] + f.entries[-1:] if (t := e.created_ns) is not None]
    return (min(times), max(times)) if times else None


def times_of(chosen: dict[int, list[DumpFile]]) -> tuple[int, dict[int, Times]]:
    """Return time zero (the oldest entry's time in ns), and the times of each rank's dump."""
    spans = {rank: span_ns(files) or (0, 0) for rank, files in chosen.items()}
    t0_ns = min((oldest for oldest, _ in spans.values() if oldest), default=0)

    def seconds(at_ns: int) -> float | None:
        return (at_ns - t0_ns) / 1e9 if at_ns > 0 else None

    out = {}
    for rank, files in chosen.items():
        newest = [f.entries[-GAP_ENTRIES:] for f in files]
        issued_ns = ([t for e in entries if (t := e.created_ns) is not None] for entries in newest)
        gaps_ns = sorted(b - a for times in issued_ns for a, b in itertools.pairwise(times))
        begun = (e.time_discovered_started_ns for entries in newest for e in entries if e.state == "started")
        begun_ns = [time_ns(t) or 0 for t in begun]
        out[rank] = Times(
            oldest_s=seconds(spans[rank][0]),
            newest_s=seconds(spans[rank][1]),
            written_s=seconds(max(f.modified_ns for f in files)) if spans[rank][0] else None,
            moved_s=seconds(max(map(_moved_ns, files))),
            asked_s=seconds(max(begun_ns, default=0)),  # the recorder checks at the dump
            usual_gap_s=gaps_ns[-GAPS_SEEN] / 1e9 if len(gaps_ns) >= GAPS_SEEN else 0.0,
        )
    return t0_ns, out


def limit_ns(e: Entry) -> int | None:
    """Return the timeout of an operation; None if it was not recorded."""
    limit_ms = time_ns(e.timeout_ms)
    return None if limit_ms is None else limit_ms * 1_000_000


def written_at_timeout(waited_s: float, limit_s: float) -> bool:
    """True if a file that was written so long after an operation was issued shows that its timeout had passed."""
    return limit_s <= waited_s <= limit_s + DUMPED_WITHIN_S


def _moved_ns(f: DumpFile) -> int:
    """Return when a dump found operations complete that the watchdog had not seen; 0 if none.

    That is when the dump was taken, and the rank had just made progress. Unknown for gloo's recorder, and for one that does not
    retire entries.
    """
    if f.backend == "gloo" or not any(e.retired for e in f.entries):
        return 0
    newest = f.entries[-GAP_ENTRIES:]
    found = (e.time_discovered_completed_ns for e in newest if e.state == "completed" and not e.retired)
    return max((time_ns(t) or 0 for t in found), default=0)


@dataclass(frozen=True, slots=True)
class LateRanks:
    """Ranks that issued a collective after its timeout."""

    group: str
    seq: int
    since_s: float  # when the first rank had issued it
    timeout_s: float
    late_s: dict[int, float]  # of each late rank: seconds after the first
    others: tuple[int, ...]


def late_ranks(snapshot: Snapshot, timeouts_s: Mapping[str, float]) -> LateRanks | None:
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
