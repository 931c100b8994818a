"""`distdiag report`: write the findings of a run into a file."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import IO

import click

from distdiag.cli.options import ascii_option
from distdiag.cli.verdict import notes_on_latest
from distdiag.errors import DistdiagError, ExitCode, need
from distdiag.streams import json_ascii_controls, say

# format: default file in the run; None: stdout
FORMATS = {"html": "report.html", "text": None, "perfetto": "trace.json", "json": None}


def _write(run_dir: Path, format: str, out: IO[bytes], last_steps: int | None) -> None:
    import msgspec

    from distdiag.store.reader import open_run

    with open_run(run_dir) as run:
        if format == "perfetto":
            from distdiag.report import perfetto

            perfetto.write(run, out, last_steps)
            return
        from distdiag.report.facts import read_facts

        facts = read_facts(run)
    if format == "json":
        out.write(json_ascii_controls(msgspec.json.encode(facts)).encode() + b"\n")
    elif format == "html":
        import logging

        from distdiag.report import html

        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # hide its notes about the font cache
        out.write(html.render(facts).encode())
    else:
        from distdiag.report import text

        out.write(text.render(facts).encode())


@click.command()
@click.argument("run", required=False, type=click.Path(readable=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="File to write, or - for stdout.  [default: RUN/report.html, RUN/trace.json; stdout for text and json]",
)
@click.option(
    "--format",
    "format",
    type=click.Choice(list(FORMATS)),
    default="html",
    show_default=True,
    help="Output format; perfetto is a trace for ui.perfetto.dev.",
)
@click.option(
    "--last-steps", type=click.IntRange(1), metavar="N", help="With --format perfetto: only the newest N steps."
)
@click.option(
    "--tape", type=click.Path(path_type=Path), help="Write only the run's tape, to send it: see `distdiag run --tape`."
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@ascii_option
def command(
    run: str | None, output: str | None, format: str, last_steps: int | None, tape: Path | None, force: bool
) -> int:
    """Write a report on RUN (default: reports/latest), running or finished.

    It has the verdict (who, where, the cost), step time, phases per rank, collectives, hosts, GPUs and versions.

    The HTML file is self-contained: it loads nothing and can be mailed.

    Exit codes: 0 written, 2 bad option or file, 4 no such run.
    """
    from distdiag.report.output import new_file
    from distdiag.store import rundir

    if last_steps is not None and format != "perfetto":
        hint = "omit it: the other formats show the whole run"
        raise DistdiagError("--last-steps is for --format perfetto only", hint)
    if tape is not None:
        return _write_tape(rundir.resolve(run), tape, force)
    run_dir = rundir.resolve(run)
    for note in notes_on_latest(run_dir) if run_dir.is_symlink() else ():
        say(f"note: {note}", err=True)
    if format == "html":
        need(("jinja2", "matplotlib"), "the HTML report")
    default = FORMATS[format]
    if output == "-" or (output is None and default is None):
        _write(run_dir, format, sys.stdout.buffer, last_steps)
        sys.stdout.buffer.flush()
        return 0
    path = Path(output) if output is not None else run_dir / str(default)
    with new_file(path, force, own=output is None) as out:
        _write(run_dir, format, out, last_steps)
    say(str(path))
    say(f"open it:  {_how_to_open(path, format)}", err=True)
    return 0


def _write_tape(run_dir: Path, path: Path, force: bool) -> int:
    """Write a copy of the run's tape, as small as possible, after reading it: a tape that cannot be read helps nobody."""
    from distdiag import files
    from distdiag.report.output import new_file
    from distdiag.tapes.tape import guarded, to_bytes
    from distdiag.tapes.writer import NAME

    if not files.is_file(run_dir, NAME):
        hint = "record the job with `distdiag run --tape`, or with DISTDIAG_TAPE=1"
        raise DistdiagError(f"{run_dir} has no tape", hint, ExitCode.NO_DATA)
    data, snapshots, paths = guarded(
        run_dir / NAME,
        lambda tape: (to_bytes(tape), len(tape.snapshots), sorted(tape.sources)),
        tuple[bytes, int, list[str]],
    )
    with new_file(path, force) as out:
        out.write(data)
    say(str(path))
    say(f"{snapshots} snapshots of the ranks; text of source files: {', '.join(paths) or 'none'}", err=True)
    return 0


def _how_to_open(path: Path, format: str) -> str:
    if format == "perfetto":
        return f"https://ui.perfetto.dev, 'Open trace file', {path}"
    if format == "html":
        opener = next((c for c in ("xdg-open", "open") if shutil.which(c)), None)
        return f"{opener} {shlex.quote(str(path))}" if opener else path.resolve().as_uri()
    return f"less {shlex.quote(str(path))}"
