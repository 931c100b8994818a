"""Runs at torchrun's exit: prints the verdict after its tracebacks, or notes that no rank started.

The monitor prints its summary when the last rank has ended. If torchrun prints its traceback after that, the
lines that people copy would end without the verdict: it is printed again. If the summary came after the
traceback, it is not. `torchrun_compat.autoload` calls `watch` in a launcher of `distdiag.run`, and `everywhere`
calls `note_unrecorded` in any other torchrun with DISTDIAG=1.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distdiag import files

SKEW_S = 5.0  # between the clocks of hosts that share a directory
VERDICT_S = 3.0  # for the monitor to write its verdict, after a launch that failed
VERDICT = "verdict.txt"  # in the run directory: the monitor's last lines
STOPPED = ".launcher.stopped"  # there: the signal that has ended the launcher, and when, by the monotonic clock
_AGENT = "torch.distributed.elastic.agent.server.api"  # the logger on which torchrun's agent reports such a signal
PRINTED_ON = ".verdict.stream"  # the stream that the monitor has printed them on, as `stderr_id` names it


def stderr_id() -> str:
    """Return an identifier of stderr's file, equal in all processes of a host; empty if it is closed."""
    try:
        stat = os.fstat(2)
    except OSError:
        return ""
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_rdev}"


def options_of(argv: list[str]) -> dict[str, Any]:
    """Return the options of `-m distdiag.run`: from the command line, the environment, then the file."""
    from distdiag import settings
    from distdiag.run import command

    options = command.make_context("", argv[argv.index("distdiag.run") + 1 :], resilient_parsing=True).params
    settings.fill(options, settings.read())
    options["run_dir"] = options["run_dir"] or os.environ.get("DISTDIAG_RUN_DIR")
    options["quiet"] = options["quiet"] or os.environ.get("DISTDIAG_QUIET") == "1"
    return options


def started_run(argv: list[str], since_unix_s: float) -> Path | None:
    """Return the run directory that a rank of this launch of `distdiag.run` has claimed; None if no rank has started."""
    return _claimed(options_of(argv)["run_dir"], since_unix_s)


def _claimed(chosen: str | None, since_unix_s: float) -> Path | None:
    """Return the run directory that a rank has claimed last, in `chosen` or among all; None if none has since."""
    from distdiag.page import directories

    newest: tuple[float, Path] | None = None
    roots = [Path(chosen)] if chosen else [Path("reports"), directories.own_fallback_root()]
    for root, folder in itertools.product(filter(None, roots), (".jobs", f".jobs-{os.getuid()}")):
        for name in files.names(root, folder):
            changed = (root / folder / name).lstat().st_mtime
            if name[0] == "." or changed < since_unix_s or (newest is not None and changed < newest[0]):
                continue
            if chosen:
                path = root if name == "0" else root / f"attempt_{name}"
            else:
                path = root / Path(files.text(root, f"{folder}/{name}").rstrip("\n")).name
            newest = changed, path
    return None if newest is None else newest[1]


def note_unrecorded() -> None:
    """At the end of torchrun with DISTDIAG=1, note a launch of which nothing was recorded, where commands would show an older run as the newest."""
    since_unix_s = time.time()

    def at_exit() -> None:
        from distdiag.store import rundir

        older = rundir.ENV not in os.environ and (rundir.ROOT / "latest").is_symlink()
        if older and not {"-h", "--help"} & {*sys.argv} and _claimed(None, since_unix_s - SKEW_S) is None:
            error = getattr(sys, "last_value", None)
            rundir.note_launch(rundir.default_run_dir("torchrun"), None if error is None else _reason(error))

    atexit.register(_never_raises, at_exit)


def _never_raises(work: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        work()


def watch(argv: list[str], since_unix_s: float) -> None:
    """Call `at_end` when this process ends; note whether there was a verdict when its traceback was printed."""
    previous, before = sys.excepthook, [False]

    def note_verdict(*error: Any) -> None:
        try:
            found = started_run(argv, since_unix_s)
            before[0] = found is not None and (found / VERDICT).exists()
        except Exception:
            before[0] = False
        previous(*error)

    def note_signal(record: logging.LogRecord) -> bool:
        if "death signal" in str(record.msg) and isinstance(record.args, tuple) and record.args:
            _note_signal(argv, since_unix_s, record.args[0])
        return True

    sys.excepthook = note_verdict
    logging.getLogger(_AGENT).addFilter(note_signal)
    atexit.register(lambda: at_end(argv, since_unix_s, before[0]))


def _note_signal(argv: list[str], since_unix_s: float, number: Any) -> None:
    """Write which signal the launcher got: a rank in C++ survives SIGINT, and shows only the SIGKILL after it. Never raises."""
    try:
        found = started_run(argv, since_unix_s)
        if found is not None:
            files.write(found, STOPPED, f"{int(number)} {time.monotonic_ns()}".encode())
    except Exception:
        return


def stopped_by(run_dir: Path) -> tuple[int, int] | None:
    """Return (signal, time by the monotonic clock) that ended this run's launcher; None if none is known."""
    try:
        number, at_ns = files.text(run_dir, STOPPED).split()
        return (int(number), int(at_ns)) if 0 < int(number) < 65 else None
    except (OSError, ValueError):
        return None


def at_end(argv: list[str], since_unix_s: float, before: bool) -> None:
    """Print the verdict of a failed launch, or note a launch without ranks. Never raises; waits only after a failure.

    Args:
        before: There was a verdict before torchrun printed its traceback.
    """
    try:
        if "-h" in argv or "--help" in argv:
            return
        found = started_run(argv, since_unix_s)
        error = getattr(sys, "last_value", None)
        if found is None:
            _note(argv, error)
        elif error is not None and not options_of(argv)["quiet"]:
            end = time.monotonic() + VERDICT_S
            while not (found / VERDICT).exists() and time.monotonic() < end:
                time.sleep(0.05)
            if not before and _printed_here(found):
                return  # after the traceback: once is enough
            text = files.text(found, VERDICT)
            sys.stderr.flush()
            os.write(2, ("\n" + text).encode("utf-8", "replace"))
    except Exception:
        return


def _reason(error: BaseException) -> str:
    """Return why a launch failed, on one line: the rank's own message if there is one, else the launcher's."""
    first_failure = getattr(error, "get_first_failure", None)
    if first_failure is None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip(" =-")]
        return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300].rstrip(": ")
    rank, failure = first_failure()
    if os.path.isfile(failure.error_file):
        message = failure.message
        return str(message["message"] if isinstance(message, dict) else message)[:300]
    return f"rank {rank} ended with exit code {failure.exitcode}"


def _printed_here(run_dir: Path) -> bool:
    """True if the monitor printed its verdict on our standard error."""
    try:
        return files.text(run_dir, PRINTED_ON) == stderr_id() != ""
    except OSError:
        return False


def _note(argv: list[str], error: BaseException | None) -> None:
    from distdiag.store import rundir

    chosen = options_of(argv)["run_dir"]
    reason = _reason(error) if error is not None else "the launcher ended before any rank began"
    rundir.note_launch(Path(chosen) if chosen else rundir.default_run_dir("launch-failed"), reason)
