"""Reads flight-recorder dumps into one snapshot: those of one run, and the newest usable dump of each rank."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from pathlib import Path

from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Life, Snapshot
from distdiag.guard import TOGETHER, Announce
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.files import read_all
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.naming import name_ranks
from distdiag.sources.dumps.runs import without_other_runs
from distdiag.sources.dumps.snapshot import SnapshotBuilder

ENTRY_BYTES = 1000  # per entry, for the limits of making the snapshot


def load(
    paths: str | Path | Iterable[str | Path],
    announce: Announce = lambda _step, _bytes: None,
    refused: Mapping[str, str] | None = None,
) -> tuple[Snapshot, LoadReport]:
    """Return all dumps in files and directories as one snapshot, and what could not be read.

    Runs in this process without limits; `verdict.diagnose_dumps` calls it in a child, with the arguments of `guard.judged`.
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
        age[f.path.parent] = max(age.get(f.path.parent, 0), f.newest_ns)
    _drop_earlier_runs(by_rank, age, report.notes)
    chosen = {r: _newest(r, files, age, report.notes) for r, files in sorted(by_rank.items())}
    chosen, report.other_runs = without_other_runs(chosen)
    report.files = {r: tuple(str(f.path) for f in files) for r, files in chosen.items()}
    snapshot = SnapshotBuilder(chosen, report).snapshot()
    known = [f for files in chosen.values() for f in files]
    failed = set()
    for bad_path in (Path(path) for path, _ in report.bad):  # whose they are shows in the names of the other files
        probe = DumpFile(bad_path)
        name_ranks([probe, *(DumpFile(f.path, groups=f.groups) for f in known if f.path.parent == bad_path.parent)])
        failed.add(probe.rank)
    absent = [r for r, st in snapshot.ranks.items() if st.life == Life.MISSING]
    report.unreadable = tuple(r for r in absent if r in failed)
    report.missing = tuple(r for r in absent if r not in failed)
    if damaged := sum(f.damaged for f in known):
        report.notes.append(f"{damaged:,} entries without group, number or name were left out")
    return snapshot, report


def _drop_earlier_runs(by_rank: dict[int, list[DumpFile]], age: dict[Path, int], notes: list[str]) -> None:
    """Remove folders of an earlier attempt: that run was over when the one in newer dumps of the same ranks began.

    A rank with a dump only in the older folder has no dump of this run.
    """
    began: dict[Path, int] = {}
    for f in (f for files in by_rank.values() for f in files if f.entries):
        if (t := f.entries[0].created_ns) is not None:
            began[f.path.parent] = min(began.get(f.path.parent, t), t)
    folders = {r: {f.path.parent for f in files} for r, files in by_rank.items()}
    over = {d for of_rank in folders.values() for d in of_rank if any(began.get(e, 0) > age[d] > 0 for e in of_rank)}
    only_there = [r for r, of_rank in folders.items() if of_rank <= over]
    notes += [f"{folder} is of an earlier run than the rest: not used" for folder in sorted(over)]
    if only_there:
        notes.append(f"{rank_list(only_there)} left a dump of that run only")
    for r in list(by_rank):
        by_rank[r] = [f for f in by_rank[r] if f.path.parent not in over]
        if not by_rank[r]:
            del by_rank[r]


def _newest(rank: int, files: list[DumpFile], age: dict[Path, int], notes: list[str]) -> list[DumpFile]:
    """Return one file of each recorder: the newest, if a rank has several."""
    best: dict[str, DumpFile] = {}
    empty: DumpFile | None = None
    for f in sorted(files, key=lambda f: (age[f.path.parent], f.newest_ns)):
        if not f.entries:
            empty = f
            continue
        old = best.get(f.backend)
        if old is not None:
            notes.append(f"rank {rank} has several dumps: {f.path} is used, {old.path} is older")
        best[f.backend] = f
    if empty is not None and all(age[f.path.parent] < age[empty.path.parent] for f in best.values()):
        notes += [f"rank {rank} has several dumps: {empty.path} is used, {f.path} is older" for f in best.values()]
        return [empty]
    return list(best.values())
