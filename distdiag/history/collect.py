"""Read run databases into rows: one per run, host, rank and finding, and one per probe recorded into a run.

The runs are read only and hostile until checked (`store/opening.py`). One that cannot be read is named and skipped.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Finding
from distdiag.errors import DistdiagError
from distdiag.store import rundir
from distdiag.store.liveness import number
from distdiag.store.probes import hosts_and_bandwidth
from distdiag.store.reader import Run, open_run
from distdiag.terms.untrusted import cut, encodable, is_count, visible

MOST_ROWS = 200_000  # of one run: a crafted one must not fill the memory


class HistoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one run with one of its findings, or without any; or a probe of a run, without a rank. None: not measured."""

    run: str
    name: str | None = None  # of the job
    started_unix_s: float | None = None
    duration_s: float | None = None
    state: str = ""
    world_size: int | None = None
    host: str | None = None
    rank: int | None = None
    life: str | None = None
    steps: int | None = None
    step_ms: float | None = None  # median of the rank's last 50 steps
    wait_ms: float | None = None
    kind: str | None = None  # of the finding whose culprit is this rank, or a cycle with it
    cause: str | None = None
    severity: str | None = None
    certainty: str | None = None
    file: str | None = None  # where this rank is in the finding
    line: int | None = None
    function: str | None = None
    first_seen_s: float | None = None
    cleared_s: float | None = None
    message: str | None = None
    probe: str | None = None
    verdict: str | None = None
    at_s: float | None = None
    bus_bandwidth_bytes_per_s: float | None = None


def runs_in(directory: Path, refused: Callable[[OSError], object] | None = None) -> Iterator[Path]:
    """Yield the directories below with a database, without those of single nodes: node 0's has the whole job.

    Args:
        refused: Is called with the error of each directory that cannot be listed.
    """
    for folder, below, names in os.walk(directory, onerror=refused):
        below[:] = sorted(d for d in below if not d.startswith("node_"))
        if rundir.DATABASE in names:
            yield Path(folder)


def read_runs(paths: Iterable[Path]) -> tuple[list[HistoryRow], list[tuple[Path, str]]]:
    """Return the rows of all runs, and for each run that cannot be read why."""
    rows: list[HistoryRow] = []
    broken: list[tuple[Path, str]] = []
    for path in paths:
        try:
            with open_run(path) as run:
                rows += rows_of(run)
        except DistdiagError as e:
            broken.append((path, e.message))
        except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as e:  # a value no version writes
            broken.append((path, f"damaged: {type(e).__name__}"))
    return rows, broken


def rows_of(run: Run) -> list[HistoryRow]:
    meta = run.meta
    started, ended_s, world = (number(meta.get(key)) for key in ("started_unix_s", "ended_s", "world_size"))
    about: dict[str, Any] = {
        "run": encodable(str(run.path)), "name": _text(meta.get("name")), "started_unix_s": started, "duration_s": ended_s,
        "state": run.state(meta)[0], "world_size": None if world is None else int(world),
    }  # fmt: skip
    found = _by_rank(run.findings())
    medians = {}
    if (frame := run.latest_frame()) is not None:
        medians = {r.rank: (r.step_ms, r.wait_ms) for r in frame.ranks}
    rows: list[HistoryRow] = []
    for r in run.ranks():
        step_ms, wait_ms = medians.get(r.rank, (None, None))
        mine = about | {
            "host": _text(r.host) or None, "rank": r.rank, "life": _text(r.life), "steps": r.step, "step_ms": step_ms,
            "wait_ms": wait_ms,
        }  # fmt: skip
        rows += [HistoryRow(**mine, **one) for one in found.pop(r.rank, [{}])]
        if len(rows) > MOST_ROWS:
            raise ValueError("too many findings")
    rows += [HistoryRow(**about, rank=rank, **one) for rank, several in found.items() for one in several]
    for p in run.probes():
        hosts, rate = hosts_and_bandwidth(p.json)
        where = {"host": _text(",".join(hosts)) or None, "at_s": p.t_s, "bus_bandwidth_bytes_per_s": rate}
        rows.append(HistoryRow(**about | where, probe=_text(p.name), verdict=_text(p.verdict)))
    return rows or [HistoryRow(**about)]


def _by_rank(findings: Iterable[Finding]) -> dict[int | None, list[dict[str, Any]]]:
    """Return by rank what `HistoryRow` shows of the findings that name it; by None those that name nobody."""
    found: dict[int | None, list[dict[str, Any]]] = defaultdict(list)
    left = MOST_ROWS
    for f in findings:
        sites = {w.rank: w for w in reversed(f.where)}  # the first of a rank: others are its callers
        blocks = f.kind in kinds.KINDS and kinds.of(f).blocks
        ranks = dict.fromkeys(f.culprits or (f.victims if blocks else ()) or (None,))
        left -= len(ranks)
        if left < 0:
            raise ValueError("too many findings")
        about = {
            "kind": _text(f.kind), "cause": _text(f.cause), "severity": str(f.severity), "certainty": str(f.certainty),
            "first_seen_s": f.first_seen_s, "cleared_s": f.cleared_s, "message": _text(f.message),
        }  # fmt: skip
        for rank in ranks:
            site = sites.get(rank) if rank is not None else None
            where = {
                "file": _text(site.file and os.path.normpath(site.file)), "line": site.line if is_count(site.line) else None, "function": _text(site.function),
            } if site else {}  # fmt: skip
            found[rank].append(about | where)
    return found


def _text(value: str | None) -> str | None:
    return None if value is None else cut(visible(value))
