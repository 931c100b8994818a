"""How processes ended, by tables that launchers print over several lines: torchrun's list of failures, mpirun's first exit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from distdiag.terms.untrusted import bounded, is_rank

# torchrun writes `rank : 3 (local_rank: 3)`, `exitcode : -9 (pid: 71)`; a prefix may precede it
_FIELD = bounded(r"(?:^|\s)(?P<key>time|host|rank|exitcode|error_file|traceback)\s{1,9}: (?P<value>.{0,400})$")
_NUMBERS = {
    "rank": bounded(r"(?P<rank>-?\d+) \(local_rank: (?P<local>\d+)\)"),
    "exitcode": bounded(r"(?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"),
}
# Open MPI and Hydra (Intel MPI, MPICH) name the process first, and on a later line how it ended
_NAME = bounded(
    r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]|=\s+(?:RANK (?P<r>\d+) )?PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)"
)
_STATUS = bounded(r"Exit code:\s+(?P<code>\d+)|EXIT CODE: (?P<raw>\d+)|KILLED BY SIGNAL: (?P<signal>\d+)")
_RAW_SIGNALS = ("6", "7", "8", "9", "11", "15")  # that Hydra prints as exit codes
_NO_EXCEPTION = ("Signal ", "To enable traceback", "Traceback (most recent")  # after the last come its lines
_MAX_ROWS = 20_000


@dataclass(slots=True)
class Row:
    """One process in a table; `fields` are named as those of a line."""

    launcher: str
    line: int
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        text = self.fields.get("rank", "")
        return int(text) if text.isdecimal() and len(text) < 7 and is_rank(int(text)) else None


def _given(m: re.Match[str]) -> dict[str, str]:
    return {key: value for key, value in m.groupdict().items() if value is not None}


class Tables:
    """Reads the tables of one file at a time; `take` returns the rows that have ended since its last call."""

    def __init__(self) -> None:
        self._now: Row | None = None
        self._seen: set[tuple[object, ...]] = set()
        self._ended: list[Row] = []
        self.rank: int | None = None  # of the newest row

    def take(self, at_end: bool = False) -> list[Row]:
        """Return the rows that have ended; with `at_end`, that of the last lines, too."""
        if at_end:
            self._close()
        rows, self._ended = self._ended, []
        return rows

    def line(self, text: str, number: int) -> bool:
        """Read a line; True if it belongs to a table."""
        if (m := _FIELD.search(text)) is not None and (self._now is not None or m["key"] in ("time", "host", "rank")):
            if m["key"] == "time" or self._now is None or self._now.launcher != "torchrun":
                self._close()
                self._now = Row("torchrun", number)
            self._field(self._now, m["key"], m["value"].strip())
        elif (m := _NAME.search(text)) is not None:
            self._close()
            self._now = Row("mpirun", number, _given(m))
            self._now.fields.setdefault("rank", self._now.fields.get("r", ""))
        elif self._now is not None and self._now.launcher == "mpirun" and (m := _STATUS.search(text)) is not None:
            self._now.fields |= _given(m)
            raw = self._now.fields.get("raw", "1")
            if raw in _RAW_SIGNALS:
                self._now.fields["signal"] = raw
            self._now.fields.setdefault("code", raw)
            self._close()
        else:
            return False
        return True

    def _field(self, row: Row, key: str, value: str) -> None:
        if key in ("time", "host"):
            row.fields[key] = value[:200]
        elif key in _NUMBERS and (m := _NUMBERS[key].search(value)) is not None:
            row.fields |= m.groupdict()
            self.rank = row.rank
        elif key == "traceback":
            row.fields["what"] = "" if value.startswith(_NO_EXCEPTION) else value[:300]
            self._close()

    def _close(self) -> None:
        row, self._now = self._now, None
        if row is None or "code" not in row.fields or len(self._seen) >= _MAX_ROWS:
            return
        row.fields["launcher"] = row.launcher
        # the root cause may be listed twice
        key = row.launcher, row.rank, *(row.fields.get(k) for k in ("pid", "code", "time"))
        if key not in self._seen:
            self._seen.add(key)
            self._ended.append(row)
