"""The questions that `distdiag history` always asks: which host, which line, which figure, in how many runs.

DuckDB counts; `terms/statistics` has the intervals.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from distdiag.store import rundir
from distdiag.terms.sites import line_text
from distdiag.terms.statistics import find_change, interval_of_share
from distdiag.terms.units import counted

if TYPE_CHECKING:
    from distdiag.history.database import History

SCHEMA = "distdiag.history/1"
SURE, LEAST_CHANGE = 0.05, 0.05  # p-value of all series together; smallest change worth a line
SHOWN = 1000
SHOWN_ONCE = 10  # lines that only one run names

# A run counts once, however many findings or ranks it has. n: the runs in which the host took part.
_HOSTS = """
WITH took AS (SELECT host, count(DISTINCT run) AS n FROM ranks WHERE host IS NOT NULL GROUP BY host)
SELECT host, kind, count(DISTINCT run) AS k, any_value(n), list(DISTINCT run ORDER BY run)[:5]
FROM findings JOIN took USING (host) WHERE severity IN ('warning', 'error')
GROUP BY host, kind ORDER BY k / any_value(n) DESC, k DESC, host, kind LIMIT ?
"""
# n: the runs of jobs of that name.
_LINES = """
WITH of_name AS (SELECT name, count(*) AS n FROM runs GROUP BY name)
SELECT file, line, any_value(function), name, kind, count(DISTINCT run) AS k, any_value(n), list(DISTINCT run ORDER BY run)[:5]
FROM findings JOIN of_name USING (name) WHERE file IS NOT NULL AND severity IN ('warning', 'error')
GROUP BY file, line, kind, name ORDER BY k DESC, k / any_value(n) DESC, file, line, kind LIMIT ?
"""
_SERIES = """
SELECT 'step time of ' || name AS what, 'ms' AS unit, world_size || ' ranks' AS whose, started_unix_s AS began, step_ms AS value
FROM runs WHERE step_ms > 0 AND started_unix_s IS NOT NULL AND name IS NOT NULL
UNION ALL
SELECT 'bus bandwidth of ' || probe, 'bytes/s', coalesce(host, '?'), started_unix_s + coalesce(at_s, 0), bus_bandwidth_bytes_per_s
FROM probes WHERE bus_bandwidth_bytes_per_s > 0 AND started_unix_s IS NOT NULL
ORDER BY what, whose, began
"""


Series = dict[tuple[str, str, str], list[tuple[float, float]]]


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """What findings of a kind named in `count` of `runs` runs."""

    kind: str
    count: int
    runs: int
    share: float
    ci95: tuple[float, float]
    examples: tuple[str, ...]


class HostAnswer(Named, frozen=True, kw_only=True):
    """A host, in the runs in which it took part."""

    host: str


class LineAnswer(Named, frozen=True, kw_only=True):
    """A line, in the runs of that job."""

    file: str
    line: int | None
    function: str | None
    name: str | None


class ChangeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A figure changed its level: medians before and from `since_unix_s` on, and their ratio with a 95 % interval."""

    what: str
    of: str
    unit: str
    since_unix_s: float
    before: float
    after: float
    ratio_ci95: tuple[float, float]
    p_value: float
    runs: int
    runs_after: int


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was skipped, and why."""

    run: str
    reason: str


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `distdiag history --output-format json`."""

    schema: str = SCHEMA
    runs: int
    rows: int
    first_unix_s: float | None
    last_unix_s: float | None
    states: dict[str, int]
    known_hosts: int  # on which ranks ran
    hosts: tuple[HostAnswer, ...]
    lines: tuple[LineAnswer, ...]
    changes: tuple[ChangeAnswer, ...]
    series: int  # that were searched for changes
    skipped: tuple[Broken, ...]


def answers(history: History, skipped: tuple[Broken, ...] = ()) -> Answers:
    (count, first, last), *_ = history.ask("SELECT count(*), min(started_unix_s), max(started_unix_s) FROM runs")
    (rows,), *_ = history.ask("SELECT count(*) FROM history")
    (known,), *_ = history.ask("SELECT count(DISTINCT host) FROM ranks")
    states = history.ask("SELECT state, count(*) FROM runs GROUP BY state ORDER BY 2 DESC, 1")
    hosts = tuple(HostAnswer(host=host, **_counted(*counts)) for host, *counts in history.ask(_HOSTS, [SHOWN]))
    lines = tuple(
        LineAnswer(file=file, line=line, function=function, name=name, **_counted(*counts))
        for file, line, function, name, *counts in history.ask(_LINES, [SHOWN])
    )
    series: Series = {}
    for what, unit, of, at, value in history.ask(_SERIES):
        series.setdefault((what, unit, of), []).append((at, value))
    return Answers(
        runs=count, rows=rows, first_unix_s=first, last_unix_s=last, states=dict(states), known_hosts=known,
        hosts=hosts, lines=lines,
        changes=tuple(_changes(series)), series=len(series), skipped=skipped,
    )  # fmt: skip


def _counted(kind: str, count: int, n: int, examples: Iterable[str]) -> dict[str, Any]:
    """Return the fields of `Named`."""
    found = interval_of_share(count, n)
    counts = {"count": count, "runs": n, "share": count / n, "ci95": (found.low, found.high)}
    return {"kind": kind, "examples": tuple(examples), **counts}


def _changes(series: Series) -> list[ChangeAnswer]:
    out = []
    for (what, unit, of), points in series.items():
        change = find_change(np.array([value for _, value in points]))
        if change is None or change.p_value > SURE / len(series):  # Bonferroni
            continue
        low, high = change.ratio.low, change.ratio.high
        if low <= 1 <= high or abs(change.after / change.before - 1) < LEAST_CHANGE:
            continue
        out.append(
            ChangeAnswer(
                what=what, of=of, unit=unit, since_unix_s=points[change.index][0], before=change.before, after=change.after,
                ratio_ci95=(low, high), p_value=change.p_value, runs=len(points), runs_after=len(points) - change.index,
            )
        )  # fmt: skip
    return sorted(out, key=lambda c: c.p_value)


def as_lines(found: Answers) -> list[str]:
    """Return the answers as text, worst first; what one run alone shows only if no line is named in more of them.

    A host is named if there are others: the only one had part in all that went wrong.
    """
    states = ", ".join(f"{n} {state}" for state, n in found.states.items())
    when = ""
    if found.first_unix_s and found.last_unix_s:
        when = ", " + " to ".join(dict.fromkeys((_day(found.first_unix_s), _day(found.last_unix_s))))
    out = [f"{counted(found.runs, 'run')}{when}: {states or 'no state'}"]
    hosts = [h for h in found.hosts if h.count > 1 and found.known_hosts > 1]
    repeated = [x for x in found.lines if x.count > 1]
    lines = repeated or found.lines[:SHOWN_ONCE]
    out += ["", "Hosts named in more than one run:"] if hosts else []
    out += [f"  {h.host}: {h.kind} in {_share(h.count, h.runs, h.ci95)} runs" for h in hosts]
    out += ["", f"Lines named in {'more than one run' if repeated else 'one run each'}:"] if lines else []
    out += [
        f"  {line_text(rundir.shown(Path(x.file)), x.line, x.function)}: {x.kind} in "
        + (f"{_share(x.count, x.runs, x.ci95)} runs of {x.name}" if repeated else ", ".join(x.examples))
        for x in lines
    ]
    out += ["", "Figures that changed:"] if found.changes else []
    out += [_change(c) for c in found.changes]
    if not (hosts or lines or found.changes):
        out += ["", "No host and no line is named in more than one run, and no figure has changed."]
    return out


def _share(count: int, n: int, ci95: tuple[float, float]) -> str:
    return f"{count} of {n} ({100 * count / n:.0f} %, 95 % interval {100 * ci95[0]:.0f}–{100 * ci95[1]:.0f} %)"


def _change(c: ChangeAnswer) -> str:
    change, low, high = (100 * (ratio - 1) for ratio in (c.after / c.before, *c.ratio_ci95))
    ratio = f"{change:+.0f} %, 95 % interval {low:+.0f} to {high:+.0f} %"
    word = "fell" if c.after < c.before else "rose"
    scale, unit = (1e9, "GB/s") if c.unit == "bytes/s" else (1, c.unit)
    before, after = (f"{v / scale:.{2 if scale > 1 else 1}f} {unit}" for v in (c.before, c.after))
    runs = f"{c.runs - c.runs_after} runs before, {c.runs_after} since"
    return f"  {c.what} ({c.of}) {word} on {_day(c.since_unix_s)}: {before} to {after} ({ratio}; {runs})"


def _day(unix_s: float) -> str:
    """Return the weekday and date, UTC."""
    try:
        return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%A %Y-%m-%d")
    except (OSError, OverflowError, ValueError):  # of a damaged run
        return "an impossible day"
