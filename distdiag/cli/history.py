"""`distdiag history`: ask many runs which host, which line, which figure."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distdiag.cli.options import ascii_option
from distdiag.errors import DistdiagError, ExitCode, need
from distdiag.streams import say, say_error, say_json, say_wrapped

if TYPE_CHECKING:
    from distdiag.history.database import History

MOST_ROWS, LIMIT_S = 10_000, 30.0
GRACE_S = 3.0  # from the limit of a query to the end of this process: DuckDB interrupts no sort and no long function


def _load(history: History, sources: tuple[str, ...]) -> list[tuple[Path, str]]:
    """Add the rows of all sources; return what was skipped, and why."""
    import msgspec

    from distdiag.history.collect import read_runs, runs_in
    from distdiag.history.database import fetch_runs

    broken: list[tuple[Path, str]] = []
    for source in sources:
        path = Path(source)
        if source.startswith("s3://"):
            with tempfile.TemporaryDirectory(prefix="distdiag-") as folder:
                found, refused = fetch_runs(source, Path(folder))
                rows, damaged = read_runs(found)
                prefix = source.split("/")[2]
                history.add([msgspec.structs.replace(row, run=_address(row.run, folder, prefix)) for row in rows])
                broken += refused + [(Path(_address(str(p), folder, prefix)), why) for p, why in damaged]
        elif path.suffix == ".parquet":
            history.add_parquet(path)
        elif path.is_dir():
            denied: list[OSError] = []
            rows, damaged = read_runs(runs_in(path, denied.append))
            history.add(rows)
            broken += damaged + [(Path(e.filename), e.strerror or str(e)) for e in denied]
        else:
            hint = "give directories with runs, s3://BUCKET/PREFIX, or a Parquet file that --parquet wrote"
            if path.exists():
                raise DistdiagError(f"{source} is a file, not a directory with runs", hint)
            raise DistdiagError(f"no directory {source}", hint, ExitCode.NO_DATA, "no_run")
    return broken


def _address(path: str, folder: str, bucket: str) -> str:
    return f"s3://{bucket}{path.removeprefix(folder)}"


def _print_rows(columns: list[str], rows: list[tuple[Any, ...]], as_json: bool) -> None:
    from distdiag.terms.tables import table
    from distdiag.terms.untrusted import visible

    if as_json:
        import msgspec

        cut = len(rows) > MOST_ROWS
        found = {"schema": "distdiag.history_rows/1", "columns": columns, "rows": rows[:MOST_ROWS], "cut": cut}
        say_json(msgspec.json.encode(found, enc_hook=str))
        return
    shown = [["–" if v is None else visible(f"{v:g}" if isinstance(v, float) else str(v)) for v in row] for row in rows]
    for line in table([columns, *shown[:MOST_ROWS]], left=range(len(columns))):
        say(line)
    if len(rows) > MOST_ROWS:
        say(f"note: the first {MOST_ROWS:,} rows; add a LIMIT or a WHERE", err=True)


@contextlib.contextmanager
def _ended_after(limit_s: float) -> Iterator[None]:
    """End the process if the block takes longer: nothing else stops a library."""

    def end() -> None:
        say_error(f"--sql takes longer than {LIMIT_S:g} s", "ask for less")
        sys.stdout.flush()
        os._exit(int(ExitCode.TIMEOUT))

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@click.command()
@click.argument("sources", nargs=-1, metavar="DIR|s3://…|FILE.parquet…")
@click.option("--parquet", metavar="FILE", help="Also write all rows to this Parquet file, which can be asked again.")
@click.option("--force", is_flag=True, help="Replace an existing --parquet FILE.")
@click.option("--sql", metavar="SELECT", help="Ask this instead: tables history, runs, ranks, findings, probes.")
@click.option(
    "--output-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print it."
)
@ascii_option
def command(sources: tuple[str, ...], parquet: str | None, force: bool, sql: str | None, output_format: str) -> int:
    """Ask many runs at once: which host was the straggler in how many jobs, which line hangs, which figure changed when.

    Reads every run.db below DIR and changes none. Shares have a 95 % Wilson interval, changes a bootstrap interval. A run that cannot be
    read is named on stderr and skipped.

    \b
    distdiag history reports/
    distdiag history reports/ \\
        --sql 'SELECT host, count(DISTINCT run) FROM findings GROUP BY host'

    Exit codes: 0 asked, 2 bad option, file or SQL, 4 no run, 5 --sql took too long.
    """
    need(("duckdb",), "history")
    from distdiag.history.answers import Broken, answers, as_lines
    from distdiag.history.database import History
    from distdiag.terms.untrusted import encodable

    if not sources:
        raise DistdiagError("history needs a directory of runs", "distdiag history reports/")
    if parquet is not None and Path(parquet).exists() and not force:
        raise DistdiagError(f"{parquet} exists", "give another file, or --force")
    with contextlib.closing(History()) as history:
        broken = _load(history, sources)
        for path, why in broken:
            say(f"skipped {path}: {why}", err=True)
        if not history.ask("SELECT 1 FROM history LIMIT 1"):
            text = f"no run could be read, {len(broken)} skipped" if broken else f"no run below {' '.join(sources)}"
            hint = "a run is a directory with run.db: `distdiag run` records one"
            raise DistdiagError(text, hint, ExitCode.NO_DATA, "no_run")
        if parquet is not None:
            history.write_parquet(Path(parquet))
            say(f"wrote {parquet}: distdiag history {parquet}", err=True)
        history.lock()
        if sql is not None:
            with _ended_after(LIMIT_S + GRACE_S):
                columns, rows = history.ask_untrusted(sql, MOST_ROWS + 1, LIMIT_S)
            _print_rows(columns, rows, output_format == "json")
            return int(ExitCode.OK)
        found = answers(history, tuple(Broken(run=encodable(str(path)), reason=why) for path, why in broken))
    if output_format == "json":
        say_json(found)
    else:
        for line in as_lines(found):
            say_wrapped(line)
    return int(ExitCode.OK)
