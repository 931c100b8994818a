"""In torchrun's own process, when it ends: print the verdict after its tracebacks, and note a launch without a rank.

The monitor prints its summary when the last rank is gone; torchrun prints its traceback after that, so that the lines which
people copy would end without the verdict. `torchrun_compat.autoload` registers `at_end` in a launcher of `distdiag.run`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

VERDICT_S = 3.0  # for the monitor to write its verdict, after a launch that failed
VERDICT = "verdict.txt"  # in the run directory: the monitor's last lines


def run_dir_option(argv: list[str]) -> str | None:
    """Value of --run-dir among the options of `-m distdiag.run`."""
    ours = argv[argv.index("distdiag.run") + 1 :]
    for i, arg in enumerate(ours):
        if arg.startswith("--run-dir="):
            return arg.partition("=")[2]
        if arg == "--run-dir" and i + 1 < len(ours):
            return ours[i + 1]
        if not arg.startswith("-") and (i == 0 or not ours[i - 1].startswith("--")):
            return None  # the script
    return None


def started_run(argv: list[str], since_unix_s: float) -> Path | None:
    """Directory that a rank of this launch has claimed; None if no rank came so far."""
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
    """What is left to do when the launcher ends; never raises, and waits only after a launch that failed."""
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
