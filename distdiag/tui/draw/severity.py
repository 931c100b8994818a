"""Severity as glyph, word and style. The colour never carries meaning alone."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.diagnosis.model.findings import Severity
from distdiag.diagnosis.model.snapshot import Life
from distdiag.store.frames import RankRow, RankTable
from distdiag.terms.signals import signal_name
from distdiag.tui.draw.text import clean, seconds

STALE_S = 3.0  # a rank whose heartbeat is older than this shows the age


@dataclass(frozen=True, eq=False)
class Mark:
    """How one severity is drawn. One object of each, compared by identity."""

    level: int  # higher is worse; the order of tables and maps
    glyph: str
    ascii: str
    word: str
    style: str
    meaning: str


OK = Mark(0, "·", ".", "ok", "muted", "nothing found")
NO_DATA = Mark(0, "–", "-", "no data", "muted", "not measured; never drawn as 0")
WAIT = Mark(1, "○", "o", "wait", "muted", "has not reported yet")
INFO = Mark(0, "·", ".", "info", "muted", "a fact worth knowing, costs nothing")
WARN = Mark(2, "▲", "!", "WARNING", "warning", "costs step time, or a trend will hurt")
ERROR = Mark(3, "█", "#", "ERROR", "error", "the job fails, hangs or computes the wrong thing")
LOST = Mark(4, "×", "x", "LOST", "error", "the process is gone, or silent")
MARKS = (OK, NO_DATA, WAIT, WARN, ERROR, LOST)

_BY_SEVERITY: dict[str, Mark] = {Severity.INFO: INFO, Severity.WARNING: WARN, Severity.ERROR: ERROR}
GONE = frozenset({Life.CRASHED, Life.KILLED, Life.SILENT})


def of_finding(severity: str) -> Mark:
    return _BY_SEVERITY.get(severity, WARN)


def of_rank(life: str | None, severity: str | None) -> Mark:
    """Return the mark of a rank: lost if its process is gone, else the worst open finding that names it."""
    if life in GONE:
        return LOST
    if severity == Severity.ERROR:
        return ERROR
    if severity == Severity.WARNING:
        return WARN
    if life == Life.MISSING:
        return WAIT
    return OK


def of_table(table: RankTable) -> list[Mark]:
    lives, life = table.coded("life")
    severities, found = table.coded("severity")
    if len(lives) == len(severities) == 1:
        return [of_rank(lives[0], severities[0])] * len(table)
    by_life = [[of_rank(x, s) for s in severities] for x in lives]
    return [by_life[a][b] for a, b in zip(life, found, strict=True)]


def state_of(row: RankRow, mark: Mark, stuck: bool = False) -> tuple[str, str]:
    """Return the last column of the rank table, `(word, style)`; in a `stuck` job a rank in a collective `waits`."""
    life = row.life
    if life == Life.KILLED:
        return signal_name(row.signal) if row.signal else "killed", LOST.style
    if life == Life.CRASHED:
        return clean(row.exception.split(":")[0]) if row.exception else "crashed", LOST.style
    if life == Life.SILENT:
        return f"silent {seconds(row.heartbeat_age_s)}" if row.heartbeat_age_s else "silent", LOST.style
    if life == Life.STOPPED:
        return "stopped", mark.style or WARN.style
    if life == Life.MISSING:
        return "not seen", WAIT.style
    if life == Life.DETACHED:
        return "detached", "muted"
    if mark.level >= WARN.level:
        return mark.word, mark.style
    if life == Life.FINISHED:
        return "done", ""
    if row.heartbeat_age_s is not None and row.heartbeat_age_s > STALE_S:
        return seconds(row.heartbeat_age_s), "muted"
    if stuck and row.waiting_op:
        return "waits", "muted"
    if life == Life.STARTING or (row.phase == "init" and not row.step):
        return "init", "muted"
    if row.phase in ("validate", "checkpoint"):
        return row.phase, ""
    return OK.word, OK.style


def stale(row: RankRow) -> bool:
    """True if the row's numbers are old; they are drawn dim."""
    return row.life in (Life.SILENT, Life.MISSING, Life.DETACHED) or (row.heartbeat_age_s or 0.0) > STALE_S
