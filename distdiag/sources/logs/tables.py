"""How processes ended, by tables that launchers print over several lines: torchrun's list of failures, mpirun's first exit."""

from __future__ import annotations

import re

from distdiag.terms.untrusted import bounded, is_rank

# torchrun writes `rank : 3 (local_rank: 3)`, `exitcode : -9 (pid: 71)`; a prefix may precede it
_FIELD = bounded(r"(?:^|\s)(?P<key>time|host|rank|exitcode|error_file|traceback)\s{1,9}: (?P<value>.{0,400})$")
_NUMBERS = {
    "rank": bounded(r"(?P<rank>-?\d+)\s{1,9}\(local_rank: (?P<local>\d+)\)"),
    "exitcode": bounded(r"(?P<code>-?\d+)\s{1,9}\(pid: (?P<pid>\d+)\)"),
}
# Open MPI and Hydra (Intel MPI, MPICH) name the process first, and on a later line how it ended
_NAME = bounded(
    r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]|=\s+(?:RANK (?P<r>\d+) )?PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)"
)
_STATUS = bounded(r"Exit code:\s+(?P<code>\d+)|EXIT CODE: (?P<raw>\d+)|KILLED BY SIGNAL: (?P<signal>\d+)")
# of MPICH and its like: the calls, innermost last, which has the reason
_ABORT = bounded(
    r"(?:Abort\(\d{1,12}\) on node \d{1,7} \(rank (?P<rank>\d{1,6}) in comm \d{1,9}\): )?(?P<how>Fatal error in \w{1,60}): .{0,160}error stack:\s*$"
)
_CALL = bounded(r"(?:^|[\]>] ?)\w{3,80}\(\d{1,6}\)\.{0,60}: ?(?P<what>.{0,300})")
_RAW_SIGNALS = ("6", "7", "8", "9", "11", "15")  # that Hydra prints as exit codes
_NO_EXCEPTION = ("Signal ", "To enable traceback", "Traceback (most recent")  # after the last come its lines
_MAX_ROWS = 20_000


def rank_of(fields: dict[str, str]) -> int | None:
    """Return the rank that a row of a table names."""
    text = fields.get("rank", "")
    return int(text) if text.isdecimal() and len(text) < 7 and is_rank(int(text)) else None


def _given(m: re.Match[str]) -> dict[str, str]:
    return {key: value for key, value in m.groupdict().items() if value is not None}


class Tables:
    """Reads the tables of one file at a time; `take` returns (line, fields) of the processes that have ended since its last call.

    The fields are named as those of a line; `launcher` is whose table it is.
    """

    def __init__(self) -> None:
        self._now: dict[str, str] | None = None
        self._line = 0  # of the row's first line
        self._seen: set[tuple[object, ...]] = set()
        self._ended: list[tuple[int, dict[str, str]]] = []
        self.rank: int | None = None  # of the newest row

    def take(self, at_end: bool = False) -> list[tuple[int, dict[str, str]]]:
        """Return the rows that have ended; with `at_end`, that of the last lines, too."""
        if at_end:
            self._close()
        rows, self._ended = self._ended, []
        return rows

    def line(self, text: str, number: int) -> bool:
        """Read a line; True if it belongs to a table."""
        if (m := _FIELD.search(text)) is not None and (self._now is not None or m["key"] in ("time", "host", "rank")):
            if m["key"] == "time" or self._now is None or self._now["launcher"] != "torchrun":
                self._close()
                self._now, self._line = {"launcher": "torchrun"}, number
            self._field(self._now, m["key"], m["value"].strip())
        elif (m := _ABORT.search(text)) is not None:
            self._close()
            self._now, self._line = {"launcher": "mpi", "code": "1", "in": m["how"], **_given(m)}, number
        elif self._now is not None and self._now["launcher"] == "mpi" and (m := _CALL.search(text)) is not None:
            self._now["how"] = f"{self._now['in']}: {m['what'].strip()}" if m["what"].strip() else self._now["how"]
        elif (m := _NAME.search(text)) is not None:
            self._close()
            self._now, self._line = {"launcher": "mpirun", **_given(m)}, number
            self._now.setdefault("rank", self._now.get("r", ""))
        elif self._now is not None and self._now["launcher"] == "mpirun" and (m := _STATUS.search(text)) is not None:
            self._now |= _given(m)
            raw = self._now.get("raw", "1")
            if raw in _RAW_SIGNALS:
                self._now["signal"] = raw
            self._now.setdefault("code", raw)
            self._close()
        else:
            return False
        return True

    def _field(self, row: dict[str, str], key: str, value: str) -> None:
        if key in ("time", "host"):
            row[key] = value[:200]
        elif key in _NUMBERS and (m := _NUMBERS[key].search(value)) is not None:
            row |= m.groupdict()
            self.rank = rank_of(row)
        elif key == "traceback":
            row["what"] = "" if value.startswith(_NO_EXCEPTION) else value[:300]
            self._close()

    def _close(self) -> None:
        row, self._now = self._now, None
        if row is None or "code" not in row or len(self._seen) >= _MAX_ROWS:
            return
        # the root cause may be listed twice
        key = row["launcher"], rank_of(row), *(row.get(k) for k in ("pid", "code", "time"))
        if key not in self._seen:
            self._seen.add(key)
            self._ended.append((self._line, row))
