"""How processes ended, by tables that launchers print over several lines: torchrun's list of failures, mpirun's first exit."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.terms.untrusted import bounded, is_rank

# torchrun writes `rank : 3 (local_rank: 3)`, `exitcode : -9 (pid: 71)`; a prefix may precede it
_FIELD = bounded(r"(?:^|\s)(?P<key>time|host|rank|exitcode|error_file|traceback)\s{1,9}: (?P<value>.{0,400})$")
_LOCAL = bounded(r"(-?\d+) \(local_rank: (\d+)\)")
_CODE = bounded(r"(-?\d+) \(pid: (\d+)\)")
_NAME = bounded(r"Process name: \[\[\d+,\d+\],(\d+)\]")
_STATUS = bounded(r"Exit code:\s+(\d+)")
MAX_EXITS = 20_000


@dataclass(slots=True)
class Exit:
    """How one rank ended."""

    launcher: str
    rank: int | None = None
    local: int | None = None
    host: str = ""
    code: int | None = None
    pid: int | None = None
    time: str = ""
    what: str = ""  # the exception, from torchrun's error file
    path: str = ""
    line: int = 0


class Tables:
    """Reads the tables of one file; `take` returns what was found since the last call."""

    def __init__(self) -> None:
        self._found: list[Exit] = []
        self._now: Exit | None = None
        self._seen: set[tuple[object, ...]] = set()
        self.rank: int | None = None  # rank of the table's newest entry

    def take(self) -> list[Exit]:
        self._close()
        found, self._found = self._found, []
        return found

    def line(self, text: str, path: str, number: int) -> bool:
        """Read a line; True if it belongs to a table."""
        if (m := _FIELD.search(text)) is not None and (self._now is not None or m["key"] in ("time", "host", "rank")):
            if m["key"] == "time" or self._now is None or self._now.launcher != "torchrun":
                self._close()
                self._now = Exit("torchrun", path=path, line=number)
            return self._field(self._now, m["key"], m["value"])
        if (m := _NAME.search(text)) is not None:
            self._close()
            self._now = Exit("mpirun", rank=int(m[1]) if is_rank(int(m[1])) else None, path=path, line=number)
            return True
        if self._now is not None and self._now.launcher == "mpirun" and (m := _STATUS.search(text)) is not None:
            self._now.code = int(m[1])
            self._close()
            return True
        return False

    def _field(self, now: Exit, key: str, value: str) -> bool:
        if key == "time":
            now.time = value.strip()[:40]
        elif key == "host":
            now.host = value.strip()[:200]
        elif key == "rank" and (m := _LOCAL.search(value)) is not None:
            now.rank, now.local = (int(m[1]) if is_rank(int(m[1])) else None), int(m[2])
            self.rank = now.rank
        elif key == "exitcode" and (m := _CODE.search(value)) is not None:
            now.code, now.pid = int(m[1]), int(m[2])
        elif key == "traceback":
            unknown = ("Signal ", "To enable traceback", "Traceback (most recent")  # the last is followed by its lines
            now.what = "" if value.startswith(unknown) else value.strip()[:300]
            self._close()
        return True

    def _close(self) -> None:
        now, self._now = self._now, None
        if now is None or now.code is None or len(self._found) >= MAX_EXITS:
            return
        key = now.launcher, now.rank, now.pid, now.code, now.time  # the root cause may be listed twice
        if key not in self._seen:
            self._seen.add(key)
            self._found.append(now)
