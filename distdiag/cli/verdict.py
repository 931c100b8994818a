"""What commands that judge print: the verdict on a job as text, and the exit code that follows from it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import click

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import BAD_STATES, Report, Severity, at_least, rank_list, still_open
from distdiag.diagnosis.text.finding import checked_lines, finding_lines, in_the_past, last_seen_lines, printable
from distdiag.errors import ExitCode
from distdiag.report.words import verdict
from distdiag.store import rundir
from distdiag.store.liveness import Monitor
from distdiag.store.opening import RunUnreadable
from distdiag.store.reader import open_run
from distdiag.streams import columns, say, wants_colour
from distdiag.terms.tables import wrapped
from distdiag.terms.units import rough_duration

SHOWN = 100  # findings as text, worst first
_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


def source(report: Report) -> str | None:
    """Return the run, how long ago it began or ended, and its command; None for dumps."""
    if report.age_s is None:
        return None
    path = Path(report.run)
    real = rundir.shown(path) if path.is_symlink() or path.parent.is_symlink() else report.run
    latest = "" if real == report.run else " (latest)"
    when = f"started {rough_duration(report.age_s)} ago"
    if report.ended_ago_s is not None:
        when = f"ended {rough_duration(report.ended_ago_s)} ago"
    command = printable(report.command or "")
    return f"run {printable(real)}{latest}, {when}" + (f": {command}" if command else "")


def exit_code(report: Report, threshold: str) -> ExitCode:
    """Return FAILED for a finding at or above `threshold` or a failed job, INCONCLUSIVE if not all ranks were judged.

    Threshold `never` returns OK in any case.
    """
    if threshold == "never":
        return ExitCode.OK
    if report.state in BAD_STATES or any(at_least(f.severity, threshold) for f in still_open(report.findings)):
        return ExitCode.FAILED
    return ExitCode.INCONCLUSIVE if report.unjudged else ExitCode.OK


def print_text(report: Report) -> None:
    width = columns()

    def block(lines: Sequence[str], title: str = "") -> None:
        """Print lines after an empty one; nothing without lines."""
        if lines:
            say(f"\n{title}" if title else "")
        for line in lines:
            say("\n".join(wrapped(line, width, "  " if title else "")))

    slow = (
        f"{rank_list(c.ranks)} may be slower; not judged yet: {c.reason}"
        for c in report.checks
        if c.ranks and not c.checked
    )
    for line in filter(None, (source(report), verdict(report), next(slow, None))):
        say("\n".join(wrapped(line, width)))
    _print_findings(report, wants_colour()[1], width)
    block(last_seen_lines(report.last_seen), "last seen:")
    errors = any(f.severity == Severity.ERROR for f in still_open(report.findings))
    block([] if errors else checked_lines(report.checks, width))
    block([f"note: {note}" for note in report.notes])


def _print_findings(report: Report, colour: bool, width: int) -> None:
    """Print the open findings, worst first, then the first line of each that was cleared."""
    open_ones = still_open(report.findings)
    cleared = [f for f in report.findings if f.cleared_s is not None and not kinds.was_replaced(f)]
    for f in open_ones[:SHOWN]:
        say()
        shown = in_the_past(f) if report.ended_ago_s is not None else f
        for i, line in enumerate(finding_lines(shown, width)):
            say(click.style(line, fg=_COLOURS[f.severity]) if colour and i == 0 else line, drawn=True)
    if len(open_ones) > SHOWN:
        say(f"\nand {len(open_ones) - SHOWN:,} more findings: --json prints them all")
    if cleared:
        say("\ncleared:")
    for f in cleared[:SHOWN]:
        say("\n".join(wrapped(finding_lines(f, 1 << 20)[0], width, "  ")))
    if len(cleared) > SHOWN:
        say(f"  and {len(cleared) - SHOWN:,} more")


def notes_on_latest(path: Path) -> Iterator[str]:
    """Yield which other runs next to `latest` are not over.

    Two jobs may share a working directory.
    """
    for other in rundir.other_runs(path):
        with suppress(RunUnreadable), open_run(other) as run:
            if run.monitor() is Monitor.LIVE:
                command = f"distdiag diagnose {shlex.quote(rundir.shown(other))}"
                yield f"another run here is not over ({printable(run.meta.get('state') or 'running')}): {printable(command)}"
