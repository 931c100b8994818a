"""Chooses which dumps are used if a rank left several: those of one run, and the newest of each recorder."""

from __future__ import annotations

from pathlib import Path

from distdiag.diagnosis.model.findings import rank_list
from distdiag.sources.dumps.content import DumpFile
from distdiag.sources.dumps.entries import backend_of, ns


def newest_ns(f: DumpFile) -> int:
    """Return when the newest entry of a dump was created; 0 if that is not recorded."""
    return (ns(f.entries[-1]) or 0) if f.entries else 0


def drop_earlier_runs(by_rank: dict[int, list[DumpFile]], age: dict[Path, int], notes: list[str]) -> None:
    """Remove folders of an earlier attempt: that run was over when the one in newer dumps of the same ranks began.

    A rank with a dump only in the older folder has no dump of this run.
    """
    began: dict[Path, int] = {}
    for files in by_rank.values():
        for f in files:
            t = ns(f.entries[0]) if f.entries else None
            if t is not None:
                began[f.path.parent] = min(began.get(f.path.parent, t), t)
    folders = {r: {f.path.parent for f in files} for r, files in by_rank.items()}
    over = {d for of_rank in folders.values() for d in of_rank if any(began.get(e, 0) > age[d] > 0 for e in of_rank)}
    only_there = [r for r, of_rank in folders.items() if of_rank <= over]
    for folder in sorted(over):
        notes.append(f"{folder} is of an earlier run than the rest: not used")
    if only_there:
        notes.append(f"{rank_list(only_there)} left a dump of that run only")
    for r in list(by_rank):
        by_rank[r] = [f for f in by_rank[r] if f.path.parent not in over]
        if not by_rank[r]:
            del by_rank[r]


def choose(rank: int, files: list[DumpFile], age: dict[Path, int], notes: list[str]) -> list[DumpFile]:
    """Return one file of each recorder: the newest, if a rank has several."""
    best: dict[str, DumpFile] = {}
    empty: DumpFile | None = None
    for f in sorted(files, key=lambda f: (age[f.path.parent], newest_ns(f))):
        if not f.entries:
            empty = f
            continue
        old = best.get(backend_of(f))
        if old is not None:
            notes.append(f"rank {rank} has several dumps: {f.path} is used, {old.path} is older")
        best[backend_of(f)] = f
    if empty is not None and all(age[f.path.parent] < age[empty.path.parent] for f in best.values()):
        notes += [f"rank {rank} has several dumps: {empty.path} is used, {f.path} is older" for f in best.values()]
        return [empty]
    return list(best.values())
