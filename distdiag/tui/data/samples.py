"""Samples of one GPU, process or host over the run, read piece by piece and bounded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from distdiag.store.reader import Run

POINTS = 400  # of a longer run every k-th sample is kept
SHORTEST_S = 0.5  # samples are further apart than this
KEPT = 24  # series in the cache: of the rows that the cursor was on
# one sample per slice of time: a seek by the primary key, not a scan of every GPU's rows
_SQL = (
    "WITH RECURSIVE slice(t) AS (VALUES (?1) UNION ALL SELECT t + ?3 FROM slice WHERE t + ?3 <= ?2)"
    " SELECT sample.t_s, {columns} FROM slice CROSS JOIN {table} AS sample ON sample.t_s ="
    " (SELECT t_s FROM {table} WHERE t_s >= slice.t AND t_s < slice.t + ?3 AND t_s <= ?2 AND {where} ORDER BY t_s LIMIT 1)"
    " AND {where_sample}"
)
COLUMNS = {
    "gpu": ("utilization_pct", "memory_used_bytes", "power_w", "temperature_c", "sm_clock_mhz", "throttle"),
    "process": ("cpu_pct", "rss_bytes", "children_cpu_pct", "read_bytes_per_s", "write_bytes_per_s"),
    "host": ("cpu_pct", "memory_used_bytes", "net_sent_bytes_per_s", "net_recv_bytes_per_s"),
}


@dataclass(frozen=True)
class Samples:
    """One series: rising times in seconds, and the values of each column; None where not measured."""

    times: tuple[float, ...] = ()
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __getitem__(self, column: str) -> tuple[Any, ...]:
        return self.columns.get(column, ())


class Series:
    """The samples of one key of one table; when there are too many, every second one is dropped."""

    def __init__(self, table: str, key: Mapping[str, int]) -> None:
        self.names = COLUMNS[table]
        self._key = tuple(key.values())
        where = [f"{name} = ?{i + 4}" for i, name in enumerate(key)]
        self._sql = _SQL.format(
            table=table,
            columns=", ".join(f"sample.{name}" for name in self.names),
            where=" AND ".join(where),
            where_sample=" AND ".join(f"sample.{w}" for w in where),
        )
        self._first = f"SELECT min(t_s) FROM {table}"
        self._every = 0.0
        self._rows: list[tuple[Any, ...]] = []

    def read(self, run: Run, end: float) -> Samples:
        """Return the samples up to `end`; only those after the last reading are read."""
        begin = self._rows[-1][0] + 0.9 * self._every if self._rows else run.query(self._first)[0][0]
        if begin is not None and begin <= end:
            self._every = self._every or max(SHORTEST_S, (end - begin) / POINTS)
            self._rows += run.query(self._sql, (begin, end, self._every, *self._key))
        while len(self._rows) > 2 * POINTS:
            self._every *= 2
            del self._rows[1::2]
        shown = self._rows[: bisect_right(self._rows, end, key=itemgetter(0))]
        times, *columns = zip(*shown, strict=True) if shown else ((),)
        return Samples(times, dict(zip(self.names, columns, strict=False)))


def read(run: Run, cache: dict[Any, Any], end: float, table: str, **key: int | None) -> Samples:
    """Return the samples of one GPU, process or host up to `end`; a key that is not known has none."""
    known = {name: value for name, value in key.items() if value is not None}
    if len(known) < len(key):
        return Samples()
    every: dict[Any, Series] = cache.setdefault("samples", {})
    name = (table, *known.values())
    series = every.pop(name, None) or Series(table, known)
    every[name] = series  # the newest last
    while len(every) > KEPT:
        del every[next(iter(every))]
    return series.read(run, end)
