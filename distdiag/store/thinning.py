"""Keep run.db within its size bound: thin the oldest rows, a slice at a time, so that no poll of the monitor waits long."""

from __future__ import annotations

import sqlite3
import time

from distdiag.store.checked import schema

CHECK_S = 5.0  # between two checks of the size while it is within the bound
LOW_WATER = 0.9  # thinning continues until the database is this fraction of the bound
SLICE_ROWS = 20_000  # step rows at a time: about 60 ms
SLICE_FRAMES = 500
NEWEST_S = 600.0  # raw rows and frames of the newest ten minutes are touched last
FRAME_EVERY_S = (10.0, 60.0, 600.0)  # spacing of the remaining older frames, coarser in each round
MINUTES_TOGETHER = (10, 60)  # a month of per-minute means of a thousand ranks is 3 GB: then fewer, over longer
GAUGE_EVERY_S = 60.0  # spacing of the remaining host, process and GPU rows

_MEANS = [c for c in schema()["step_minute"] if c not in ("rank", "minute", "steps", "samples")]
_TO_MINUTES = f"""
INSERT INTO step_minute (rank, minute, steps, samples, {", ".join(_MEANS)})
SELECT rank, CAST(coalesce(t_end_s, 0) / 60 AS INTEGER), count(*), sum(samples), {", ".join(f"avg({c})" for c in _MEANS)}
FROM step WHERE step < :cut GROUP BY 1, 2
ON CONFLICT (minute, rank) DO UPDATE SET
  {", ".join(f"{c} = coalesce(({c} * steps + excluded.{c} * excluded.steps) / (steps + excluded.steps), {c}, excluded.{c})" for c in _MEANS)},
  samples = coalesce(samples + excluded.samples, samples, excluded.samples),
  steps = steps + excluded.steps
"""
_TOGETHER = f"""
SELECT rank, :minute, sum(steps), sum(samples), {", ".join(f"sum({c} * steps) / sum(CASE WHEN {c} IS NULL THEN 0 ELSE steps END)" for c in _MEANS)}
FROM step_minute WHERE minute >= :minute AND minute < :end GROUP BY rank
"""
_MINUTE_ROW = f"INSERT INTO step_minute (rank, minute, steps, samples, {', '.join(_MEANS)}) VALUES ({', '.join('?' * (4 + len(_MEANS)))})"


def database_bytes(con: sqlite3.Connection) -> int:
    """Return the bytes in use: pages without the free list (which `incremental_vacuum` releases)."""
    pages, free, size = (
        con.execute(f"PRAGMA {p}").fetchone()[0] for p in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


class Keeper:
    def __init__(self, keep_bytes: int) -> None:
        self.keep_bytes = keep_bytes
        self._check_at = 0.0
        self._thinning = False
        self._full_reported = False
        self._frame_round = 0
        self._minute_round, self._minutes_from = 0, 0  # minutes before the latter are already together
        self._newest_s = NEWEST_S
        self._gauge_from: dict[str, float] = {}  # rows before this time are already thinned

    def tick(self, con: sqlite3.Connection, t_s: float) -> list[str]:
        """Thin one slice if the database is over its bound; return lines to report. The connection is in autocommit mode.

        Raises:
            sqlite3.Error: the write failed.
        """
        now = time.monotonic()
        if now < self._check_at:
            return []
        size = database_bytes(con)
        if not self._thinning and size <= self.keep_bytes:
            self._check_at = now + CHECK_S
            return []
        lines: list[str] = []
        if not self._thinning:
            self._thinning = True
            lines.append(
                f"run.db reached its bound of {self.keep_bytes / 2**20:,.0f} MiB: the oldest step rows become "
                "per-minute means, older frames and gauges are thinned"
            )
        con.execute("BEGIN IMMEDIATE")
        try:
            changed = self._slice(con, t_s)
            con.execute("COMMIT")
        except BaseException:
            con.execute("ROLLBACK")
            raise
        # fetchall: each returned row is one freed page; without it only one is freed
        con.execute("PRAGMA incremental_vacuum(2000)").fetchall()
        if database_bytes(con) <= self.keep_bytes * LOW_WATER:
            self._thinning = False
            self._check_at = now + CHECK_S
        elif not changed:
            self._thinning = False
            self._check_at = now + 60.0
            if not self._full_reported:
                self._full_reported = True
                lines.append(f"run.db stays at {size / 2**20:,.0f} MiB, over its bound: no older rows are left to thin")
        return lines

    def _slice(self, con: sqlite3.Connection, t_s: float) -> bool:
        """Thin one slice of each table; False if nothing is left to thin.

        Rows that have just become old are thinned, too, but are too few to matter: only a whole slice counts as change, or a
        trickle of them would hide that the bound is not kept.
        """
        old = t_s - self._newest_s
        changed = self._steps(con, old)
        changed |= self._frames(con, old)
        changed |= self._gauges(con, old)
        changed |= self._oldest(con, "collective", "pgroup, seq", old)
        changed |= self._oldest(con, "scalar", "rowid", old)
        if not changed and self._frame_round < len(FRAME_EVERY_S) - 1:
            self._frame_round += 1
            return True
        if not changed and self._minutes(con, old):
            return True
        if not changed and self._newest_s > 30.0:
            # even the newest ten minutes exceed the bound: keep less of them
            self._newest_s /= 2
            self._frame_round = 0
            return True
        return changed

    def _steps(self, con: sqlite3.Connection, old: float) -> bool:
        first = con.execute("SELECT step, t_end_s FROM step ORDER BY step LIMIT 1").fetchone()
        if first is None:
            return False
        row = con.execute("SELECT step FROM step ORDER BY step LIMIT 1 OFFSET ?", (SLICE_ROWS,)).fetchone()
        newest = con.execute("SELECT max(step) FROM step").fetchone()[0]
        cut = min(row[0] if row else newest, newest - 64)  # the screens show the last fifty steps
        oldest_kept = con.execute("SELECT max(t_end_s) FROM step WHERE step = ?", (cut - 1,)).fetchone()[0]
        if cut <= first[0] or (oldest_kept is not None and oldest_kept > old):
            return False
        con.execute(_TO_MINUTES, {"cut": cut})
        con.execute("DELETE FROM step WHERE step < ?", (cut,))
        return row is not None and cut == row[0]

    def _frames(self, con: sqlite3.Connection, old: float) -> bool:
        every = FRAME_EVERY_S[self._frame_round]
        # the last frame of each interval stays; so does every frame at which the state changed
        gone = con.execute(
            "DELETE FROM frame WHERE t_s IN (SELECT t_s FROM ("
            " SELECT t_s, state, CAST(t_s / ?1 AS INTEGER) AS slot,"
            " lead(CAST(t_s / ?1 AS INTEGER)) OVER w AS next_slot, lag(state) OVER w AS before FROM frame"
            " WHERE t_s < ?2 WINDOW w AS (ORDER BY t_s))"
            " WHERE slot = next_slot AND state = before LIMIT ?3)",
            (every, old, SLICE_FRAMES),
        ).rowcount
        return gone == SLICE_FRAMES

    def _minutes(self, con: sqlite3.Connection, old: float) -> bool:
        """Put the means of the oldest minutes together that are not yet; False if there are none."""
        together = MINUTES_TOGETHER[self._minute_round]
        first = con.execute("SELECT min(minute) FROM step_minute WHERE minute >= ?", (self._minutes_from,)).fetchone()[
            0
        ]
        minute = (first or 0) // together * together
        end = minute + together
        if first is None or end * 60 > old:
            if self._minute_round == len(MINUTES_TOGETHER) - 1:
                return False
            self._minute_round, self._minutes_from = self._minute_round + 1, 0
            return self._minutes(con, old)
        span = {"minute": minute, "end": end}
        rows = con.execute(_TOGETHER, span).fetchall()
        con.execute("DELETE FROM step_minute WHERE minute >= :minute AND minute < :end", span)
        con.executemany(_MINUTE_ROW, rows)
        self._minutes_from = end
        return True

    def _gauges(self, con: sqlite3.Connection, old: float) -> bool:
        changed = False
        for table, key in (("host", "node"), ("process", "rank"), ("gpu", "node, gpu")):
            begin = self._gauge_from.get(table, float("-inf"))
            first = con.execute(f"SELECT min(t_s) FROM {table} WHERE t_s >= ?", (begin,)).fetchone()[0]
            if first is None or first + GAUGE_EVERY_S > old:
                continue
            begin = first // GAUGE_EVERY_S * GAUGE_EVERY_S
            end = min(begin + 10 * GAUGE_EVERY_S, old // GAUGE_EVERY_S * GAUGE_EVERY_S)
            con.execute(
                f"DELETE FROM {table} WHERE t_s >= ?1 AND t_s < ?2 AND (t_s, {key}) NOT IN (SELECT max(t_s), {key}"
                f" FROM {table} WHERE t_s >= ?1 AND t_s < ?2 GROUP BY CAST(t_s / ?3 AS INTEGER), {key})",
                (begin, end, GAUGE_EVERY_S),
            )
            self._gauge_from[table] = end
            changed = True
        return changed

    def _oldest(self, con: sqlite3.Connection, table: str, key: str, old: float) -> bool:
        gone = con.execute(
            f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE t_s < ? LIMIT ?)",
            (old, SLICE_ROWS // 4),
        ).rowcount
        return gone == SLICE_ROWS // 4
