"""Decide from table `meta` whether the monitor of a run still writes; and from its log, whether it failed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from distdiag import files
from distdiag.terms.untrusted import MAX_INT, visible

# A monitor without a heartbeat for this long counts as gone. It beats once a second, or every eight seconds if all cores are busy
# and no reader is open. That its process cannot be seen proves nothing: containers have their own process numbers.
SILENT_S = 13.0
MONITOR_LOG = "monitor.log"  # in the run's directory: the traceback of a monitor that failed
LOG_BYTES = 4096  # of its end are read
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]{0,99}(Error|Exception)\b")


class Monitor(StrEnum):
    """State of the process that writes the run."""

    LIVE = "live"
    ENDED = "ended"  # it closed the run
    GONE = "gone"  # no heartbeat although the run was not closed


def monitor_of(meta: Mapping[str, str | None]) -> Monitor:
    """Return whether the run is still being written: by the recorded end, else by its heartbeat."""
    if meta.get("monitor_ended") == "1" or meta.get("ended_s") is not None:
        return Monitor.ENDED
    age = heartbeat_age_s(meta)
    return Monitor.GONE if age is None or age > SILENT_S else Monitor.LIVE


def heartbeat_age_s(meta: Mapping[str, str | None]) -> float | None:
    """Return the seconds since the monitor last wrote; None if it never did."""
    beat = number(meta.get("heartbeat_unix_s"))
    return None if beat is None else max(0.0, time.time() - beat)


def failure_of(run_dir: Path) -> str | None:
    """Return the last line of the monitor's log, if that is an exception; None if the monitor has not failed."""
    try:
        with open(files.open_to_read(run_dir, MONITOR_LOG), "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - LOG_BYTES))
            lines = f.read(LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    last = next((line for line in reversed(lines) if line.strip()), "")
    return visible(last[:200]) if _EXCEPTION.match(last) else None


def number(text: str | None) -> float | None:
    """Return a meta value as a number; None if it is missing, invalid or not finite."""
    try:
        value = None if text is None else float(text)
    except ValueError:
        return None
    return value if value is not None and abs(value) < MAX_INT else None
