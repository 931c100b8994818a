"""Read run.db, live or afterwards: read-only connections, short waits, a clear error for what cannot be read.

Rows are light Structs; only `table` and `steps_frame` import pandas.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from distdiag.diagnosis.model.findings import (
    KILLED,
    Certainty,
    Check,
    Finding,
    Report,
    Severity,
    State,
    rank_list,
    ranks_seen,
)
from distdiag.errors import need
from distdiag.page import directories
from distdiag.store import rundir
from distdiag.store.database import Database
from distdiag.store.frames import TABLE_COLUMNS, Frame, RankRow, unpack_table
from distdiag.store.gradients import read_gradients
from distdiag.store.liveness import Monitor, failure_of, heartbeat_age_s, monitor_of, number
from distdiag.store.opening import CORRUPT_HINT, ReadStatus, RunUnreadable, check_version, connect, locate, unreadable
from distdiag.store.rows import (
    CollectiveRow,
    Event,
    GpuRow,
    GroupRow,
    HostRow,
    LoaderRow,
    ProbeResult,
    ProcessRow,
    StepRow,
)
from distdiag.terms import secrets
from distdiag.terms.ranks import unfold_ranks
from distdiag.terms.units import unit_of
from distdiag.terms.untrusted import encodable, is_rank

if TYPE_CHECKING:
    import pandas as pd

MOST_META = 1 << 20  # characters of a value: `checks` of all kinds has some thousand
_finding = msgspec.json.Decoder(Finding)
_STATES, _SEVERITIES, _CERTAINTIES = (frozenset(map(str, e)) for e in (State, Severity, Certainty))


def state_of(meta: dict[str, str | None]) -> str:
    """Return the state of the job; "waiting" if it is missing or unknown."""
    state = meta.get("state")
    return state if state in _STATES and state is not None else State.WAITING


def _checked(f: Finding) -> Finding:
    """Return the finding if its words are those of the contract and its ranks can be ranks.

    Raises:
        ValueError: they are not.
    """
    ranks = itertools.chain(f.culprits, f.victims, (w.rank for w in (*f.where, *f.waiting)))
    if f.severity not in _SEVERITIES or f.certainty not in _CERTAINTIES or not all(map(is_rank, ranks)):
        raise ValueError("not a finding")
    return f


class Run(Database):
    """An open run; every method reads the newest contents. Not for use by two threads at once."""

    # -- the run as a whole -------------------------------------------------------------------------------------

    @property
    def meta(self) -> dict[str, str | None]:
        """Table `meta` as text, without secrets in the command line; see schema.sql for the keys."""
        rows = self.query(f"SELECT CAST(key AS TEXT), substr(CAST(value AS TEXT), 1, {MOST_META}) FROM meta LIMIT 1000")
        found: dict[str, str | None] = {k: v for k, v in rows if k is not None}
        if (command := found.get("command")) and not secrets.kept():
            found["command"] = secrets.mask_text(command)
        return found

    def monitor(self, meta: dict[str, str | None] | None = None) -> Monitor:
        """Return whether the run is still being written."""
        meta = self.meta if meta is None else meta
        found = monitor_of(meta)
        return Monitor.GONE if found is Monitor.LIVE and self.killed(meta) else found

    def killed(self, meta: dict[str, str | None]) -> str | None:
        """Return which ranks were killed together with the monitor, by the locks on the pages; None for any other run."""
        if monitor_of(meta) is Monitor.ENDED or not directories.abandoned(self.path):
            return None
        ranks = [r.rank for r in self.ranks() if r.life in ("starting", "running", "stopped", "silent")]
        return f"{rank_list(ranks)} {KILLED}" if ranks else None

    def state(self, meta: dict[str, str | None] | None = None) -> tuple[str, str | None]:
        """Return the state of the job, and what decided it."""
        meta = self.meta if meta is None else meta
        killed = self.killed(meta)
        return (State.FAILED, killed) if killed else (state_of(meta), meta.get("state_text") or None)

    def findings(self) -> tuple[Finding, ...]:
        """Return all findings, worst and newest first, cleared ones last."""
        rows = self.query(
            "SELECT json FROM finding ORDER BY cleared_s IS NOT NULL,"
            " CASE severity WHEN 'error' THEN 0 WHEN 'warning' THEN 1 ELSE 2 END, detected_s DESC, id"
        )
        out = []
        for (text,) in rows:
            # one damaged record must not hide the others
            with contextlib.suppress(msgspec.DecodeError, TypeError, ValueError, RecursionError):
                out.append(_checked(_finding.decode(text)))
        return tuple(out)

    def report(self) -> Report:
        """Return the run as `distdiag diagnose --json` prints it."""
        meta = self.meta
        seen = self.query("SELECT count(*) FROM rank WHERE life IS NOT NULL AND life != 'missing'")[0][0]
        world = number(meta.get("world_size"))
        notes, unjudged = [], None
        if self.monitor(meta) is Monitor.GONE:
            age = heartbeat_age_s(meta)
            unjudged = "the monitor is gone" + (f", last seen {age:,.0f} s ago" if age is not None else "")
            failure = failure_of(self.path)
            reason = f" (it failed: {failure})" if failure else ""
            notes.append(f"the monitor is gone{reason}: nothing after its last row is known")
        elif meta.get("ended_s") is not None and state_of(meta) in (State.WAITING, State.RUNNING):
            unjudged = "the recording ended before the job"
            notes.append("the monitor was ended from outside while ranks ran: nothing after its last row is known")
        elif world is None or seen < world:
            unjudged = ranks_seen(seen, None if world is None else int(world))
        if self.note:
            notes.append(self.note)
        state, state_text = self.state(meta)
        started, ended_s = number(meta.get("started_unix_s")), number(meta.get("ended_s"))
        age_s = None if started is None else max(0.0, time.time() - started)
        return Report(
            run=encodable(str(self.path)),
            state=state,
            world_size=None if world is None or not is_rank(int(world)) else int(world),
            ranks_seen=seen,
            findings=self.findings(),
            notes=tuple(notes),
            checks=self.checks(meta),
            unjudged=unjudged,
            state_text=state_text,
            command=meta.get("command") or None,
            age_s=age_s,
            ended_ago_s=None if age_s is None or ended_s is None else max(0.0, age_s - ended_s),
            gradients=read_gradients(self),
        )

    def checks(self, meta: dict[str, str | None]) -> tuple[Check, ...]:
        """Return what the diagnosis could judge so far; empty for runs of versions that did not record it."""
        try:
            return msgspec.json.decode(meta.get("checks") or "[]", type=tuple[Check, ...])
        except msgspec.DecodeError:
            return ()

    # -- frames -------------------------------------------------------------------------------------------------

    def latest_frame(self) -> Frame | None:
        """Return the newest frame; None before the first."""
        return self._frame("ORDER BY t_s DESC LIMIT 1")

    def frame_at(self, t_s: float) -> Frame | None:
        """Return the newest frame not after `t_s`, else the first one."""
        return self._frame("WHERE t_s <= ? ORDER BY t_s DESC LIMIT 1", (t_s,)) or self._frame("ORDER BY t_s LIMIT 1")

    def frame_step(self, t_s: float, count: int) -> float | None:
        """Return the time of the frame `count` frames after `t_s` (before, if negative), or the last one in that direction."""
        way, order = (">", "") if count > 0 else ("<", "DESC")
        rows = self.query(f"SELECT t_s FROM frame WHERE t_s {way} ? ORDER BY t_s {order} LIMIT ?", (t_s, abs(count)))
        return rows[-1][0] if rows else t_s

    def _frame(self, where: str, args: Sequence[Any] = ()) -> Frame | None:
        rows = self.query(f"SELECT t_s, state, state_text, ranks FROM frame {where}", args)
        if not rows:
            return None
        t_s, state, text, blob = rows[0]
        try:
            return Frame(float(t_s), state if state in _STATES else "", text or "", unpack_table(blob))
        except (msgspec.DecodeError, zlib.error, TypeError, ValueError) as e:
            raise RunUnreadable(
                ReadStatus.CORRUPT, f"{self.database}: the frame at {t_s} s is damaged", CORRUPT_HINT
            ) from e

    # -- rows ---------------------------------------------------------------------------------------------------

    def ranks(self) -> list[RankRow]:
        """Return the newest state of every rank that wrote, by rank; only the columns of table `rank`."""
        return self.structs(RankRow, "ORDER BY rank", fields=TABLE_COLUMNS)

    def steps(self, first: int, last: int, ranks: Sequence[int] | None = None) -> list[StepRow]:
        """Return step rows from step `first` to `last`, of `ranks` (None = all), by step and rank."""
        if ranks is None:
            return self.structs(StepRow, "WHERE step BETWEEN ? AND ? ORDER BY step, rank", (first, last))
        names = StepRow.__struct_fields__
        return [StepRow(**dict(zip(names, r[2:], strict=True))) for r in self.step_values(names, first, last, ranks)]

    def step_values(
        self, columns: Sequence[str], first: int, last: int, ranks: Sequence[int], every: int = 1
    ) -> list[tuple[Any, ...]]:
        """Return `(step, rank, value, …)` of every so many-th step from `first` to `last`, of these ranks.

        Each row is found by its key: for a range of steps, SQLite would read the rows of all ranks; at 4,096 ranks a
        thousand times too many.
        """
        marks = ",".join("?" * len(ranks))
        return self.query(
            "WITH RECURSIVE wanted(n) AS (VALUES (?1) UNION ALL SELECT n + ?3 FROM wanted WHERE n + ?3 <= ?2)"
            f" SELECT {', '.join(('step.step', 'step.rank', *self.named('step', columns)))} FROM wanted"
            f" CROSS JOIN step ON step.step = wanted.n AND step.rank IN ({marks})",
            (first, last, every, *ranks),
        )

    def collectives(self, last_steps: int = 50, t_s: float | None = None, limit: int = 5000) -> list[CollectiveRow]:
        """Return completed collectives of the last steps, newest first; the newest `limit` if steps are not known."""
        newest = self.query("SELECT max(step) FROM collective WHERE (?1 IS NULL OR t_s <= ?1)", (t_s,))[0][0]
        low = -1 if newest is None else newest - last_steps
        return self.structs(
            CollectiveRow,
            "WHERE (?1 IS NULL OR t_s <= ?1) AND (step IS NULL OR step > ?2) ORDER BY t_s DESC LIMIT ?3",
            (t_s, low, limit),
        )

    def groups(self) -> list[GroupRow]:
        """Return the process groups, largest first."""
        out = []
        for name, text, backend, ranks in self.query(
            "SELECT name, description, backend, ranks FROM pgroup ORDER BY size DESC, name"
        ):
            try:
                members = unfold_ranks(ranks or "")
            except ValueError:
                members = ()
            out.append(GroupRow(name=name or "", ranks=members, description=text or "", backend=backend or ""))
        return out

    def hosts(self, t_s: float | None = None) -> list[HostRow]:
        """Return the newest row of each node, not after `t_s`."""
        return self.newest(HostRow, "node", t_s)

    def processes(self, t_s: float | None = None) -> list[ProcessRow]:
        """Return the newest row of each rank's process, not after `t_s`."""
        return self.newest(ProcessRow, "rank", t_s)

    def gpus(self, t_s: float | None = None) -> list[GpuRow]:
        """Return the newest row of each GPU, not after `t_s`, by node and index."""
        return self.newest(GpuRow, "node, gpu", t_s)

    def loaders(self) -> list[LoaderRow]:
        """Return the newest state of every DataLoader, by rank; empty if none was recorded."""
        if not self.query("SELECT 1 FROM sqlite_master WHERE name = 'loader'"):
            return []
        return self.structs(LoaderRow, "ORDER BY rank, loader")

    def probes(self) -> list[ProbeResult]:
        """Return the probe results recorded into this run, oldest first."""
        return [ProbeResult(*r) for r in self.query("SELECT t_s, name, verdict, json FROM probe ORDER BY t_s")]

    def events(self, limit: int = 200) -> list[Event]:
        """Return the newest events, oldest first."""
        rows = self.query("SELECT t_s, source, level, text FROM event ORDER BY rowid DESC LIMIT ?", (limit,))
        return [Event(*r) for r in reversed(rows)]

    # -- pandas -------------------------------------------------------------------------------------------------

    def table(self, name: str) -> pd.DataFrame:
        """Return a whole table as a pandas frame: step, step_minute, collective, gpu, host, process, …

        The frame's `attrs["units"]` has the unit of each column that has one, `{"step_ms": "ms"}`; what a column is: docs/reference/run-db.md.

        Raises:
            ValueError: there is no such table.
            DistdiagError: pandas is not installed.
        """
        need(("pandas",), "a table as a frame")
        import pandas as pd

        if name not in {n for (n,) in self.query("SELECT name FROM sqlite_master WHERE type = 'table'")}:
            raise ValueError(f"no table {name}")
        columns = [r[1] for r in self.query(f"PRAGMA main.table_info({name})")]
        frame = pd.DataFrame(self.query(f"SELECT {', '.join(columns)} FROM {name}"), columns=columns)
        frame.attrs["units"] = {column: unit for column in columns if (unit := unit_of(column)) is not None}
        return frame

    def steps_frame(self) -> pd.DataFrame:
        """Return table `step` as a pandas frame: one row per rank and step; `attrs["units"]` has the unit of each column."""
        return self.table("step")


_Kind = TypeVar("_Kind", bound=Run)


def open_run(path: Path | str, kind: type[_Kind] = Run) -> _Kind:
    """Open a run directory for reading.

    Raises:
        RunUnreadable: with its `status`; also if the monitor has not created the database yet.
    """
    path = Path(path)
    if path.name == rundir.DATABASE:
        path = path.parent
    database = locate(path)
    try:
        con, note = connect(database)
        try:
            check_version(con, database)
        except BaseException:
            con.close()
            raise
    except sqlite3.Error as e:
        raise unreadable(e, path, database) from e
    if path.is_symlink() and (newer := rundir.newer_launch(path)) is not None:
        note = "; ".join(filter(None, (note, newer[1])))
    return kind(path, database, con, note)
