"""Runs in torchrun's process at its exit: prints the verdict after torchrun's tracebacks, or notes that no rank started.

The monitor prints its summary when the last rank has ended. torchrun prints its traceback after that, so the lines that people
copy would end without the verdict. `torchrun_compat.autoload` registers `at_end` in a launcher of `distdiag.run`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

VERDICT_S = 3.0  # for the monitor to write its verdict, after a launch that failed
VERDICT = "verdict.txt"  # in the run directory: the monitor's last lines


def run_dir_option(argv: list[str]) -> str | None:
    """Return the value of --run-dir among the options of `-m distdiag.run`."""
    from distdiag.run import command

    return command.make_context("", argv[argv.index("distdiag.run") + 1 :], resilient_parsing=True).params["run_dir"]


def started_run(argv: list[str], since_unix_s: float) -> Path | None:
    """Return the run directory that a rank of this launch has claimed; None if no rank has started."""
    from distdiag.page import place

    chosen = run_dir_option(argv) or os.environ.get("DISTDIAG_RUN_DIR")
    newest: tuple[float, Path] | None = None
    for root in [Path(chosen)] if chosen else [Path("reports"), place.fallback_root()]:
        for record in (root / ".jobs").glob("[0-9a-f]*"):
            changed = record.stat().st_mtime
            if changed < since_unix_s or (newest is not None and changed < newest[0]):
                continue
            if chosen:
                path = root if record.name == "0" else root / f"attempt_{record.name}"
            else:
                path = Path(record.read_text().rstrip("\n"))
            newest = changed, path
    return None if newest is None else newest[1]


def at_end(argv: list[str], since_unix_s: float) -> None:
    """Print the verdict of a failed launch, or note a launch without ranks. Never raises; waits only after a failure."""
    try:
        if "-h" in argv or "--help" in argv:
            return
        found = started_run(argv, since_unix_s)
        error = getattr(sys, "last_value", None)
        if found is None:
            _note(argv, error)
        elif error is not None and "--quiet" not in argv and os.environ.get("DISTDIAG_QUIET") != "1":
            end = time.monotonic() + VERDICT_S
            while not (found / VERDICT).exists() and time.monotonic() < end:
                time.sleep(0.05)
            text = (found / VERDICT).read_text()
            sys.stderr.flush()
            os.write(2, ("\n" + text).encode("utf-8", "replace"))
    except Exception:
        return


def _note(argv: list[str], error: BaseException | None) -> None:
    from distdiag.store import rundir

    chosen = run_dir_option(argv) or os.environ.get("DISTDIAG_RUN_DIR")
    reason = (
        f"{type(error).__name__}: {error}"[:300] if error is not None else "the launcher ended before any rank began"
    )
    rundir.note_failed_launch(Path(chosen) if chosen else rundir.default_run_dir("launch-failed"), reason)
