"""Times from a dump's entries: when it was taken, how long its rank has paused, and the group's timeout."""

from __future__ import annotations

import itertools

from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.entries import backend_of, ns, timeout_ms
from distdiag.sources.dumps.load_report import LoadReport

GAPS_SEEN = 3  # number of pauses of a length after which a rank is expected to pause that long again
GAP_ENTRIES = 200  # newest entries whose pauses are measured


def note_times(chosen: dict[int, list[DumpFile]], report: LoadReport) -> int:
    """Write the times of each rank's dump to `report`, in seconds since the oldest entry; return that entry's time in ns."""
    first: list[int] = []
    spans: dict[int, tuple[int, int]] = {}
    for rank, files in chosen.items():
        times = [t for f in files if f.entries for e in (f.entries[0], f.entries[-1]) if (t := ns(e)) is not None]
        if times:
            spans[rank] = min(times), max(times)
            first.append(min(times))
    t0_ns = min(first, default=0)
    limits = {timeout_ms(f.entries[-1]) for files in chosen.values() for f in files if f.entries}
    if len(limits) == 1 and (limit := limits.pop()) is not None:
        report.timeout_s = limit / 1e3
    for rank, files in chosen.items():
        if (moved := max((_moved_ns(f) for f in files), default=0)) > 0:
            report.moved_s[rank] = (moved - t0_ns) / 1e9
        if (asked := max((_asked_ns(f) for f in files), default=0)) > 0:
            report.asked_s[rank] = (asked - t0_ns) / 1e9
        gaps = [g for f in files for g in _gaps_s(f)]
        if len(gaps) >= GAPS_SEEN:
            report.usual_gap_s[rank] = sorted(gaps)[-GAPS_SEEN]
    for rank, (low, high) in spans.items():
        report.oldest_s[rank] = (low - t0_ns) / 1e9
        report.newest_s[rank] = (high - t0_ns) / 1e9
        report.modified_s[rank] = (max(f.modified_ns for f in chosen[rank]) - t0_ns) / 1e9
    return t0_ns


def _gaps_s(f: DumpFile) -> list[float]:
    """Return the times between consecutive operations, of a file's newest entries."""
    times = [t for e in f.entries[-GAP_ENTRIES:] if (t := ns(e)) is not None]
    return [(b - a) / 1e9 for a, b in itertools.pairwise(times)]


def _moved_ns(f: DumpFile) -> int:
    """Return when a dump found operations complete that the watchdog (ten times a second) had not seen; 0 if none.

    That is when the dump was taken, and the rank had just made progress. Unknown for gloo's recorder, and for one that does not
    retire entries.
    """
    if backend_of(f) == "gloo" or not any(e["retired"] for e in f.entries):
        return 0
    found = (
        ns(e, "time_discovered_completed_ns")
        for e in f.entries[-GAP_ENTRIES:]
        if e["state"] == "completed" and not e["retired"]
    )
    return max((t for t in found if t is not None), default=0)


def _asked_ns(f: DumpFile) -> int:
    """Return when a dump found operations in flight that the device had begun; 0 if none. The recorder checks at the dump."""
    begun = (ns(e, "time_discovered_started_ns") for e in f.entries[-GAP_ENTRIES:] if e["state"] == "started")
    return max((t for t in begun if t is not None), default=0)
