"""Times from a rank's dump: when it was taken, how long the rank has paused, and the collectives' timeout."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.entries import Entry, time_ns

GAPS_SEEN = 3  # number of pauses of a length after which a rank is expected to pause that long again
GAP_ENTRIES = 200  # newest entries that are examined
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
