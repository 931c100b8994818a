"""Probe a host with a running job: find the run, warn about the disturbance, record the result in it.

Only run.db is read and written; a probe adds one row per result.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distdiag.errors import DistdiagError
from distdiag.probekit.command.options import Options
from distdiag.probekit.verdict.result import Result, Row
from distdiag.terms.operations import bus_bandwidth, family, message_bytes

_BUSY_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class RunBeside:
    """The run that is active while the probe runs."""

    path: Path
    database: Path
    name: str
    live: bool
    world_size: int | None
    started_unix_s: float

    def warning(self, options: Options) -> str:
        """Return the warning to print before the probe disturbs the job."""
        ranks = f"{self.world_size} ranks" if self.world_size else "its ranks"
        what = "the GPUs' links and memory" if options.device == "cuda" else "the CPUs and memory bandwidth"
        return (
            f"distdiag: run {self.name} is running here: for up to {options.budget_s:g} s this probe competes with "
            f"{ranks} for {what}; its steps will be slower, and the probe will find the host busy"
        )

    def shown_against_job(self, results: list[Result]) -> None:
        """Add to each collective's result the bandwidth of the job's own calls."""
        connection = sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S)
        with contextlib.closing(connection) as con:
            calls = [job_collectives(con, result.probe) for result in results]
        for result, own in zip(results, calls, strict=True):
            if own is None:
                continue
            result.details["job"] = own
            rows: list[Row] = result.rows
            near = min(rows, key=lambda row, size=own["bytes"]: abs(row.bytes - size), default=None)
            if near is not None and own["busbw_gbps"] is not None and near.busbw_gbps is not None:
                result.notes.append(
                    f"the job's own {own['op']} of {own['bytes']:,} bytes reaches {own['busbw_gbps']:.2f} GB/s "
                    f"({own['count']} calls, p50 {own['p50_us']:,.0f} us); the probe {near.busbw_gbps:.2f} GB/s at {near.bytes:,}"
                )

    def record(self, results: list[Result]) -> str:
        """Insert the results into table `probe`; return a line for stderr: recorded, or why not."""
        t_s = time.time() - self.started_unix_s
        rows = [(t_s, r.probe, r.verdict.value, json.dumps(r.as_json())) for r in results]
        try:
            connection = sqlite3.connect(f"file:{self.database}?mode=rw", uri=True, timeout=_BUSY_TIMEOUT_S)
            with contextlib.closing(connection) as con, con:
                con.executemany("INSERT INTO probe (t_s, name, verdict, json) VALUES (?, ?, ?, ?)", rows)
        except sqlite3.Error as e:
            return f"distdiag: not recorded into {self.path}: {e}"
        return f"recorded into {self.path} (table probe)"


def read_run(path: Path) -> RunBeside:
    from distdiag.store import reader

    with reader.open_run(path) as run:
        meta = run.meta
        size, name = reader.number(meta.get("world_size")), meta.get("name") or path.resolve().name
        started = reader.number(meta.get("started_unix_s")) or time.time()
        live = run.monitor(meta) is reader.Monitor.LIVE
        return RunBeside(path, run.database, name, live, int(size) if size else None, started)


def find_run(options: Options) -> RunBeside | None:
    """Return the run given with `--run` (an error if it is none), else the newest one if it is running, else None."""
    if options.no_record and options.run_dir is None:
        return None
    from distdiag.store import rundir

    try:
        found = read_run(rundir.resolve(options.run_dir))
    except DistdiagError:
        if options.run_dir is not None:
            raise
        return None
    return found if found.live or options.run_dir is not None else None


def job_collectives(con: sqlite3.Connection, probe: str) -> dict[str, Any] | None:
    """Return the job's own speed in this operation: the size that carries most bytes, with its p50 and busbw.

    Durations are those of the rank that arrived last, so they contain no waiting. None if the job made no such call.
    """
    operation = family(probe)
    if operation is None or operation.factor is None:
        return None
    forms = [form.partition("=")[0] for form in operation.forms.split()]
    try:
        rows = con.execute(
            f"SELECT bytes, duration_us, ranks FROM collective WHERE op IN ({', '.join('?' * len(forms))}) "
            "AND duration_us > 0 AND bytes > 0 ORDER BY t_s DESC LIMIT 400",
            forms,
        ).fetchall()
    except sqlite3.Error:
        return None
    by_size: dict[tuple[int, int], list[float]] = {}
    for recorded, duration_us, ranks in rows:
        if (size := message_bytes(probe, recorded, ranks)) is not None:
            by_size.setdefault((size, ranks or 0), []).append(duration_us)
    if not by_size:
        return None
    (size, ranks), durations = max(by_size.items(), key=lambda item: item[0][0] * len(item[1]))
    p50_us = statistics.median(durations)
    busbw = bus_bandwidth(probe, size, p50_us / 1e6, ranks) if ranks >= 2 else None
    return {"op": operation.name, "bytes": size, "count": len(durations), "p50_us": p50_us, "busbw_gbps": busbw}
