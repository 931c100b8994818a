"""A run whose monitor has written no row: whether its job starts, runs elsewhere or has ended, and what else lies in the directory."""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import time
from pathlib import Path

from distdiag import files, procfs
from distdiag.page import directories
from distdiag.page.reader import is_mapped
from distdiag.store import rundir
from distdiag.store.liveness import MONITOR_LOG, failure_of

STARTING_S = 60.0  # between the claim of a directory and the first page in it
MAX_PAGES = 1024  # that are read
RECORD = ".node_0"


def explain(run_dir: Path, what: str) -> tuple[str, str]:
    """Return (message, hint) for a run without rows; `what` is missing: "RUN has no run.db"."""
    if (reason := rundir.failed_launch(run_dir)) is not None:
        return _failed_launch(run_dir, reason)
    owner, record, instead = files.owner_of_other(run_dir), _record(run_dir), _else(run_dir)
    if owner is not None:
        return what, f"it belongs to {owner}, who can see whether its job is starting"
    if record is None:
        hint = "was it started with `DISTDIAG=1`, or does it call distdiag.attach()?"
        if _age_s(run_dir) < rundir.STARTING_S:
            return f"{what} yet", f"the job is starting; {hint}"
        hint = instead or f"{hint} If this is a copy, copy run.db and hidden files, too"
        return f"{what}, and no rank has claimed it", hint
    host, pid, ticks = record
    if host != socket.gethostname():
        hint = f"look there; {instead or 'if this is a copy, copy run.db, too'}"
        return f"{what}, and its job was started on {host}", hint
    folders = itertools.chain(*directories.of_run(run_dir).values())
    pages = [page for folder in folders for page in itertools.islice(folder.glob("*.page"), MAX_PAGES)]
    launched = pid.isdigit() and str(procfs.start_ticks(pid[:9])) == ticks
    removed = files.is_file(run_dir, MONITOR_LOG) and not directories.of_run(run_dir)  # by the monitor, at the end
    young = launched and not removed and _age_s(run_dir / RECORD) < STARTING_S
    if any(map(is_mapped, pages)) or (not pages and young):
        return f"{what} so far", "the monitor is just starting; try again"
    reason = failure_of(run_dir) or ("the disk is full" if _is_full(run_dir) else None)
    ended = f"{what}, and no process uses its pages: the job has ended"
    printed = "the findings are at the end of the job's stderr"
    if reason is not None:
        hint = instead or f"{printed}; free the disk before the next run"
        return f"{ended}, and its monitor could not write ({reason})", hint
    return f"{ended}, or this is a copy", instead or f"{printed}; copy run.db, too"


def _failed_launch(run_dir: Path, reason: str) -> tuple[str, str]:
    """Return (message, hint) for a launch without a rank, with its reason and the previous run."""
    real = run_dir.resolve()
    launches = rundir.launches(real.parent)
    which = "the last launch" if [real] == launches[:1] else f"the launch of {run_dir}"
    before = next(filter(rundir.recorded, launches), None)
    hint = "read the launcher's messages"
    if before is not None:
        hint = f"for the previous run: distdiag diagnose {shlex.quote(rundir.shown(before))}"
    return f"{which} failed before any rank was recorded: {reason}", hint


def _record(run_dir: Path) -> tuple[str, str, str] | None:
    """Return (host, pid, start ticks) of the launcher that claimed the directory; None if nobody did."""
    try:
        host, _, rest = files.text(run_dir, RECORD, directories.RECORD_BYTES).partition(" ")[0].partition(":")
    except OSError:
        return None
    pid, _, ticks = rest.partition(":")
    return (host, pid, ticks) if host else None


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _else(run_dir: Path) -> str | None:
    """Return what to read instead; None if nothing lies there."""
    if files.names(run_dir, "flight_recorder"):
        return f"`distdiag diagnose {shlex.quote(str(run_dir / 'flight_recorder'))}` judges the flight records"
    if files.is_file(run_dir, "verdict.txt"):
        return f"its findings are in {run_dir / 'verdict.txt'}"
    return None


def _is_full(run_dir: Path) -> bool:
    try:
        return not os.statvfs(run_dir).f_bavail
    except OSError:
        return False
