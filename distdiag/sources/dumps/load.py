"""Reads flight-recorder dumps into one snapshot: the newest usable dump of each rank."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from distdiag.diagnosis.model.snapshot import Life, Snapshot
from distdiag.guard import TOGETHER, Announce
from distdiag.sources.dumps.choice import choose, drop_earlier_runs, newest_ns
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.files import read_all
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.naming import name_ranks
from distdiag.sources.dumps.snapshot import SnapshotBuilder

ENTRY_BYTES = 1000  # per entry, for the limits of making the snapshot


def load(
    paths: str | Path | Iterable[str | Path],
    announce: Announce = lambda _step, _bytes: None,
    refused: Mapping[str, str] | None = None,
) -> tuple[Snapshot, LoadReport]:
    """Return all dumps in files and directories as one snapshot, and what could not be read.

    Runs in this process without limits; `verdict.diagnose_dumps` calls it in a child.

    Args:
        announce: Called before each file and before the snapshot is made, with the size of the input in bytes.
        refused: Files not to be read, with the reason.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    collecting = gc.isenabled()
    gc.disable()  # millions of small containers live until the snapshot is made: a garbage collection would free nothing
    try:
        return _load([Path(p) for p in given], announce, refused)
    finally:
        if collecting:
            gc.enable()


def _load(paths: list[Path], announce: Announce, refused: Mapping[str, str] | None) -> tuple[Snapshot, LoadReport]:
    read, bad, others = read_all(paths, announce, refused)
    announce(TOGETHER, sum(len(f.entries) for f in read) * ENTRY_BYTES)
    report = LoadReport(bad=bad, others=others)
    by_rank: dict[int, list[DumpFile]] = {}
    for f in read:
        if f.rank is None:
            report.bad.append((str(f.path), "its rank is not known: no number in its name or content"))
        else:
            by_rank.setdefault(f.rank, []).append(f)
    age: dict[Path, int] = {}  # a dump without entries counts as recent
    for f in read:
        age[f.path.parent] = max(age.get(f.path.parent, 0), newest_ns(f))
    drop_earlier_runs(by_rank, age, report.notes)
    chosen = {r: choose(r, files, age, report.notes) for r, files in sorted(by_rank.items())}
    report.files = {r: tuple(str(f.path) for f in files) for r, files in chosen.items()}
    snapshot = SnapshotBuilder(chosen, report).snapshot()
    known = [f for files in chosen.values() for f in files]
    failed = {r for path, _ in report.bad if (r := _rank_of_bad(Path(path), known)) is not None}
    absent = [r for r, st in snapshot.ranks.items() if st.life == Life.MISSING]
    report.unreadable = tuple(r for r in absent if r in failed)
    report.missing = tuple(r for r in absent if r not in failed)
    damaged = sum(f.damaged for f in known)
    if damaged:
        report.notes.append(f"{damaged:,} entries without group, number or name were left out")
    return snapshot, report


def _rank_of_bad(path: Path, known: Sequence[DumpFile]) -> int | None:
    """Return the rank of a damaged file, from the names of the other files."""
    probe = DumpFile(path, None, "", {}, {}, [])
    siblings = [DumpFile(f.path, None, "", f.groups, {}, []) for f in known if f.path.parent == path.parent]
    name_ranks([probe, *siblings])
    return probe.rank
