"""`distdiag diagnose`: the verdict on a run, or on flight-recorder dumps and logs from any cluster."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click
import msgspec

from distdiag.cli.options import ascii_option, fail_on_option
from distdiag.cli.verdict import exit_code, notes_on_latest, print_text
from distdiag.diagnosis.model.findings import BAD_STATES, Report, Severity, at_least, ranks_seen, still_open
from distdiag.diagnosis.text.finding import finding_lines, in_the_past, printable, why_lines
from distdiag.errors import DistdiagError, ExitCode
from distdiag.page import directories
from distdiag.store import rundir
from distdiag.store.liveness import MONITOR_LOG, failure_of
from distdiag.store.opening import RunUnreadable, locate
from distdiag.store.reader import open_run
from distdiag.streams import say, say_json, say_wrapped
from distdiag.terms.units import counted

TAKE_OVER_S = 40.0  # most for a monitor to judge the run, or close that of a job that ended
JUDGED_S = 2.5  # for a new monitor to judge a running job
HEAD_BYTES = 1 << 12  # a file of stacks begins with them; a log may have some anywhere
MOST_STDIN = 4 << 30  # bytes; it is copied into the temporary directory
_PIPE = re.compile(r"-|/dev/stdin|/(?:dev|proc/self)/fd/[0-9]+")  # also `<(zcat job.log.gz)` of a shell
_TAKE_STACKS = re.compile(r"^take the stacks?\b.* the next time")  # the log may have them
_ARCHIVE = re.compile(r"\.(?:zip|tar(?:\.\w{1,4})?|t(?:gz|bz2?|xz|zst))$")


def _of_files(targets: tuple[str, ...]) -> Report:
    """Return the verdict on dumps and logs; with both, the dumps show who waits, the logs who failed."""
    from distdiag.sources.dumps.verdict import NoDumps, diagnose_dumps
    from distdiag.sources.logs.files import find_logs
    from distdiag.sources.logs.verdict import diagnose_logs, failures_first, stopped
    from distdiag.sources.stacks.files import diagnose_stacks

    logs = find_logs(targets)
    named = {str(path) for path in logs}
    others = tuple(t for t in targets if t not in named)
    in_logs = diagnose_logs(targets, logs)
    try:
        report = diagnose_dumps(others, stopped=in_logs is not None and stopped(in_logs))
    except NoDumps as e:
        for target in targets:
            if (below := rundir.run_below(Path(target))) is not None:
                return _of_run(str(below))
        report = in_logs
        if report is None or not report.findings:
            stacks = diagnose_stacks(targets, dead=report is None)
            if stacks is not None:
                return stacks
        if report is not None:
            asked = [f for f in report.findings if _TAKE_STACKS.search(f.advice)]
            stacks = diagnose_stacks(targets, dead=False) if asked else diagnose_stacks(targets, within=HEAD_BYTES)
            found = stacks.findings if stacks else ()
            seen = [f.message if asked else f"{f.message}; do: {f.advice}" for f in found]
            notes = [f"the stacks given with the log show, by their own numbers: {text}" for text in seen]
            findings = (
                msgspec.structs.replace(f, advice=found[0].advice) if found and f in asked else f
                for f in report.findings
            )
            return msgspec.structs.replace(report, findings=tuple(findings), notes=(*notes, *report.notes))
        raise _nothing_to_read(others, e.report.bad) from e
    if in_logs is None:
        return report
    return failures_first(msgspec.structs.replace(report, run=", ".join(targets)), in_logs)


def _nothing_to_read(targets: tuple[str, ...], bad: list[tuple[str, str]]) -> DistdiagError:
    """Return the error for files of which none is a dump or a log."""
    from distdiag.tapes.tape import is_tape

    if not bad:
        what = f"no flight-recorder dump in {', '.join(targets)}, and no log"
    else:
        path, reason = bad[0]
        what = f"{path}: {reason}" + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
    hint = "give the directory that TORCH_NCCL_DEBUG_INFO_TEMP_FILE points to, its files, logs of the ranks or the launcher, or a run directory"
    if (tape := next((t for t in targets if is_tape(Path(t))), None)) is not None:
        what = f"{tape} is a tape: what the diagnosis of a run was given"
        hint = f"in a clone of distdiag, `distdiag bench faults --replay {shlex.quote(tape)}` judges it again; a verdict needs the run's directory"
    archive = next((t for t in targets if _ARCHIVE.search(t)), None)
    if archive is not None:
        unpack = "unzip -d unpacked" if archive.endswith(".zip") else "mkdir unpacked && tar -C unpacked -xf"
        hint = f"unpack the archive first: {unpack} {shlex.quote(archive)} && distdiag diagnose unpacked"
    code = ExitCode.NO_DATA if not bad else ExitCode.USAGE
    return DistdiagError(printable(what), printable(hint), code, "no_dumps")


def _of_run(target: str | None) -> Report:

    path = rundir.resolve(target)
    if (newer := rundir.newer_launch(path)) is not None and rundir.failed_launch(newer[0]) is not None:
        locate(newer[0])  # raises why it failed
    _finish(path)
    report = _autopsy(path)
    if report is None:
        with open_run(path) as run:
            report = run.report()
    if not report.ranks_seen:
        if (failure := failure_of(path)) is not None:
            hint = f"the traceback is in {path / MONITOR_LOG}; the job itself is not affected"
            raise DistdiagError(f"the monitor of {path} failed: {failure}", hint, ExitCode.NO_DATA, "no_rank")
        raise rundir.no_rank_yet(path)
    notes = (*report.notes, *_earlier(path), *(notes_on_latest(path) if path.is_symlink() else ()))
    return msgspec.structs.replace(report, notes=notes)


def _earlier(path: Path) -> Iterator[str]:
    """Yield which attempts of a job that its launcher has started again came before this one."""
    from distdiag.diagnosis.text.finding import printable
    from distdiag.store import rundir

    found = rundir.attempts(path)
    before = found[: [x.resolve() for x in found].index(path.resolve())] if len(found) > 1 else []
    if before:
        commands = ", ".join(f"`distdiag diagnose {shlex.quote(rundir.shown(x / rundir.DATABASE))}`" for x in before)
        yield f"the launcher has started this job again; before this attempt: {printable(commands)}"


def _finish(path: Path) -> None:
    """Wait until the run is judged: start a monitor if the old one was killed, or wait for its first rank.

    Returns at once if no monitor of the run runs here, and none can be started.
    """
    if not directories.of_run(path):
        return  # closed, or on another host
    from distdiag.recorder.start_monitor import take_over

    pages, taken = take_over(path)
    started = time.time()
    while time.time() - started < TAKE_OVER_S and any(map(directories.monitor_runs, pages)):
        try:
            with open_run(path) as run:
                meta, ranks = run.meta, run.ranks()
        except RunUnreadable:
            meta, ranks = {}, []
        beat = float(meta.get("heartbeat_unix_s") or 0.0)
        judged = not taken or (meta.get("state") != "waiting" and beat > started + JUDGED_S)
        if meta.get("ended_s") is not None or (ranks and judged):
            return
        time.sleep(0.1)


def _with_files(run: Report, others: tuple[str, ...]) -> Report:
    """Return the verdict on a run and its logs or dumps: the run's own, unless only they show an error."""

    files = _of_files(others)
    errors = [f for f in files.findings if at_least(f.severity, Severity.ERROR)]
    names = printable(", ".join(others))
    if any(at_least(f.severity, Severity.ERROR) for f in still_open(run.findings)):
        notes = [f"{names} has: {f.message}" for f in errors]
        return msgspec.structs.replace(run, notes=(*run.notes, *notes))
    note = f"from {names}: {counted(len(errors), 'error')}" if errors else f"{names}: nothing found"
    return msgspec.structs.replace(run, findings=(*run.findings, *errors), notes=(*run.notes, note))


def _autopsy(path: Path) -> Report | None:
    """Return the verdict on a job that was killed together with its monitor; None for any other run."""
    try:
        with open_run(path) as run:
            closed = run.meta.get("ended_s") is not None
    except RunUnreadable:
        closed = not directories.of_run(path)
    if closed:
        return None
    from distdiag.monitor.autopsy import autopsy

    return autopsy(path)


def _is_run(target: str) -> bool:
    path = Path(target)
    rundir.check_readable(path)
    if path.name == rundir.DATABASE:
        return True
    if not path.is_dir():
        return False
    return (
        rundir.is_claimed(path)
        or bool(rundir.attempts(path))
        or ((path / "latest").is_dir() and bool(rundir.attempts(path / "latest")))
    )


@contextmanager
def _with_pipes(targets: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the targets with the path of a copy in place of each pipe: standard input (`-`), or one that a shell has made."""
    pipes = [t for t in targets if _PIPE.fullmatch(t)]
    if not pipes:
        yield targets
        return
    with tempfile.TemporaryDirectory(prefix="distdiag-") as folder:
        names = {t: "standard input" if t in ("-", "/dev/stdin") else t for t in pipes}
        # no digit in their names: it would be a rank
        copies = {t: _copied(t, names[t], Path(folder, f"stdin{'-' * n}.log")) for n, t in enumerate(names)}
        try:
            yield tuple(copies.get(t, t) for t in targets)
        except DistdiagError as e:
            for target, copy in copies.items():
                e.message = e.message.replace(copy, names[target])
            raise


def _copied(target: str, name: str, path: Path) -> str:
    """Return the path of a copy of what a pipe has."""
    if target == "-" and (sys.stdin is None or not sys.stdin.readable()):
        raise DistdiagError("standard input is closed", "`distdiag diagnose FILE` reads a file")
    with nullcontext(sys.stdin.buffer) if target == "-" else open(target, "rb") as pipe, path.open("wb") as file:
        left = MOST_STDIN
        while left and (chunk := pipe.read(min(left, 1 << 20))):
            left -= file.write(chunk)
    if not left:
        raise DistdiagError(f"{name} has more than {MOST_STDIN >> 20:,} MiB", "write it into a file, and name that")
    return str(path)


def _report(targets: tuple[str, ...]) -> Report:
    if not targets:
        return _of_run(None)
    if len(targets) == 1 and _is_run(targets[0]):
        return _of_run(targets[0])
    absent = [t for t in targets if not Path(t).exists()]
    if absent:
        raise DistdiagError(
            f"{absent[0]}: no such file or directory",
            "give a run directory, or flight-recorder dumps and logs: files or directories",
            ExitCode.NO_DATA if len(targets) == 1 else ExitCode.USAGE,
            "no_run",
        )
    runs = [t for t in targets if _is_run(t)]
    if len(runs) > 1:
        hint = "give one run, with or without its logs and dumps"
        raise DistdiagError(f"{runs[0]} and {runs[1]} are both runs", hint)
    return _with_files(_of_run(runs[0]), tuple(t for t in targets if t not in runs)) if runs else _of_files(targets)


def _print_why(report: Report, kind: str) -> None:
    from distdiag.diagnosis.kinds import KINDS

    if kind not in KINDS:
        raise DistdiagError(f"there is no kind of finding '{kind}'", f"one of {', '.join(KINDS)}")
    for line in why_lines(kind, report.checks, report.findings):
        say(printable(line))
    if any(c.kind == kind and c.checked for c in report.checks):
        causes = f"checked for: {', '.join(KINDS[kind].causes)}; " if KINDS[kind].causes else ""
        say_wrapped(f"  {causes}{ranks_seen(report.ranks_seen, report.world_size)}")
    if report.unjudged:
        say_wrapped(f"  only partly judged: {report.unjudged}")
    for f in report.findings:
        if f.kind == kind:
            say("\n".join(["", *finding_lines(in_the_past(f) if report.ended_ago_s is not None else f)]))


def _traces(targets: tuple[str, ...]) -> list[Path]:
    from distdiag.traces.files import find

    return [] if any(_is_run(t) for t in targets) else find(targets)


def _failure_in_others(targets: tuple[str, ...], traces: list[Path]) -> Report | None:
    """Return the verdict on the dumps and logs that were given together with traces, if the job failed."""
    from distdiag.sources.dumps.files import find

    known = set(traces)
    others = tuple(str(path) for path, _ in find(map(Path, targets)) if path not in known)
    try:
        report = _of_files(others) if others else None
    except DistdiagError as e:
        if e.kind == "no_dumps":  # nor logs
            return None
        raise
    if report is None or not (report.state in BAD_STATES or report.findings):
        return None
    note = f"{counted(len(traces), 'trace')} not analysed: the failure comes first; give the traces alone"
    return msgspec.structs.replace(report, run=", ".join(targets), notes=(*report.notes, note))


def _diagnose_traces(targets: tuple[str, ...], traces: list[Path], as_json: bool) -> int:
    """Analyse the Kineto traces of several ranks together and print the result."""
    from distdiag.traces import text
    from distdiag.traces.files import diagnose
    from distdiag.traces.read import BadTrace

    try:
        found = diagnose(targets[0], traces)
    except BadTrace as e:
        hint = "give one trace per rank, as export_chrome_trace of torch.profiler writes it"
        raise DistdiagError(printable(str(e)), hint, kind="no_traces") from None
    if as_json:
        say_json(found)
    else:
        for line in text.lines(found):
            say(printable(line))
    return int(ExitCode.OK if found.ranks else ExitCode.NO_DATA)


@click.command()
@click.argument("targets", nargs=-1, metavar="[RUN | DUMP-DIR | LOG-DIR | FILES…]", type=click.Path(readable=False))
@click.option("--json", "as_json", is_flag=True, help="Print one object (distdiag.findings/1).")
@click.option(
    "--output-format",
    type=click.Choice(["text", "json", "github", "gitlab", "sarif", "junit", "markdown"]),
    default="text",
    help="github, gitlab, sarif, junit: for CI, each finding on its line of this repository; markdown: for an issue.",
)
@fail_on_option("Exit 1 if a finding is at least this bad, or the job failed.", "error", "warning", "never")
@click.option("--why", metavar="KIND", help="Print why this kind of finding was found or not, e.g. straggler.")
@ascii_option
def command(targets: tuple[str, ...], as_json: bool, output_format: str, fail_on: str, why: str | None) -> int:
    """Print the verdict on a running job, a finished one, or flight-recorder dumps and logs from any cluster.

    RUN is a run directory (default: reports/latest). Dumps are JSON or pickle, plain or gzipped, from any
    torch 2.x, with the rank in their name or content. No code in them is run. Ranks without a dump are
    listed.

    Logs are text of the ranks, torchrun, Slurm or Kubernetes, plain or gzipped: what torch, NCCL, the
    launcher and the kernel report in them is put in order. `-` is standard input.

    Stacks are what `py-spy dump` (text or --json), faulthandler and gdb (`py-bt`) print, one file per rank or
    several in one. They show where each rank is, so their verdict is suspected, not proved; `distdiag attach` takes them
    itself.

    Exit codes: 0 nothing at or above --fail-on, 1 found or the job failed, 2 bad option or file, 3 not all
    ranks could be judged, 4 no run, no dump, no rank has written. --fail-on never always exits 0.

    Kineto traces (torch.profiler's JSON, one per rank) are analysed together: compute, communication,
    overlap, waits for other ranks, and which rank comes last; --json prints distdiag.profile/1. If dumps or
    logs given with them show a failure, that comes first, and the traces are not analysed.
    """

    as_json = as_json or output_format == "json"
    with _with_pipes(targets) as files:
        return _command(files, as_json, output_format, fail_on, why)


def _command(targets: tuple[str, ...], as_json: bool, output_format: str, fail_on: str, why: str | None) -> int:
    """Print the verdict on files; returns the exit code."""
    traces = _traces(targets) if why is None else []
    report = _failure_in_others(targets, traces) if traces else _report(targets)
    if report is None and not as_json and output_format != "text":
        raise DistdiagError(f"traces have no {output_format}", "traces are analysed as text or with --json")
    if report is None:
        return _diagnose_traces(targets, traces, as_json)
    if why is not None:
        _print_why(report, why)
        return int(ExitCode.OK)
    if as_json:
        say_json(report)
    elif output_format != "text":
        from distdiag.report.formats import FORMATS, repository

        written = FORMATS[output_format](report, repository(Path.cwd()))
        (say_json if output_format in ("gitlab", "sarif") else say)(written)
    else:
        print_text(report)
    return int(exit_code(report, fail_on))
