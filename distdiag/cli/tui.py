"""`distdiag tui`: watch a run live, or replay a finished one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distdiag.cli.verdict import notes_on_latest
from distdiag.errors import DistdiagError, ExitCode, need
from distdiag.streams import needs_ascii, say, say_json
from distdiag.terms.untrusted import cut

if TYPE_CHECKING:
    from distdiag.tui.ui import Ui

SCREENS = (
    "ranks", "comm", "heat", "memory", "findings", "data", "stacks", "probes", "timeline", "profile", "rank", "help",
)  # fmt: skip


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    m = re.fullmatch("([0-9]{1,4})x([0-9]{1,4})", text)
    if m is None:
        raise DistdiagError(f"--size {cut(text, 40)}: not WIDTHxHEIGHT", "for example --size 120x30")
    width, height = int(m[1]), int(m[2])
    if width < 60 or height < 10:
        raise DistdiagError(f"--size {text} is too small", "the smallest is 60x10")
    return width, height


def _ui(
    screen: str, rank: int | None, sort: str, reverse: bool, filter_text: str, at_s: float | None, ascii_only: bool
) -> Ui:
    from distdiag.tui.data import filters
    from distdiag.tui.data.order import BY_KEY
    from distdiag.tui.ui import Ui

    if sort not in BY_KEY:
        raise DistdiagError(f"--sort {sort}: unknown sort order", f"one of {', '.join(BY_KEY)}")
    try:
        chosen = filters.parse(filter_text)
    except filters.BadFilter as e:
        raise DistdiagError(f"--filter {e}", "for example --filter 'rank 0-7 sev>=warning'") from None
    if rank is not None and screen == "ranks":
        screen = "rank"
    return Ui(
        page=screen, rank=rank if rank is not None else 0, sort=sort, reverse=reverse, filter=chosen, paused_at_s=at_s,
        ascii=ascii_only or needs_ascii(),
    )  # fmt: skip


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path, readable=False))
@click.option(
    "--once", is_flag=True, help="Print one screen and exit: as large as the terminal, or every row into a pipe."
)
@click.option("--json", "as_json", is_flag=True, help="With --once: one snapshot as JSON (distdiag.snapshot/1).")
@click.option(
    "--screen",
    type=click.Choice(SCREENS),
    metavar="NAME",
    default="ranks",
    show_default=True,
    help=f"First screen, or the one to print: {', '.join(SCREENS)}.",
)
@click.option("--rank", type=click.IntRange(0, 1_000_000), help="Start on this rank's own screen.")
@click.option(
    "--at",
    "at_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Show the run at this time, in seconds since it began.",
)
@click.option(
    "--filter",
    "filter_text",
    default="",
    metavar="WORDS",
    help="Only these ranks: 'node084', 'rank 600-700', 'sev>=warning'.",
)
@click.option(
    "--sort",
    default="severity",
    show_default=True,
    metavar="ORDER",
    help="severity, rank, self_ms, delta, wait_ms, data_ms, step, memory, …",
)
@click.option("--reverse", is_flag=True, help="Reverse the sort order.")
@click.option("--hz", type=click.FloatRange(0.1, 10), default=2.0, show_default=True, help="Refreshes per second.")
@click.option("--size", metavar="WxH", help="With --once: size in cells, for example 120x30.")
@click.option("--ascii", "ascii_only", is_flag=True, help="ASCII glyphs only (automatic if the locale is not UTF-8).")
@click.option("--theme", metavar="NAME", help="Colours: textual-dark, textual-light, ansi-dark, ansi-light, nord, …")
@click.option("--web", is_flag=True, help="Serve the view to a browser on this machine, protected by a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --web: the port (default: any free one).")
def command(
    run: Path | None, once: bool, as_json: bool, screen: str, rank: int | None, at_s: float | None, filter_text: str, sort: str,
    reverse: bool, hz: float, size: str | None, ascii_only: bool, theme: str | None, web: bool, port: int,
) -> int:  # fmt: skip
    """Watch a run live, or replay a finished one. Read-only: the job is not affected.

    RUN is a run directory; default: DISTDIAG_RUN_DIR, else reports/latest.

    \b
    distdiag tui                     the newest run, live
    distdiag tui --once              one screen as text, for a pipe or an issue
    distdiag tui --once --json       one snapshot as JSON
    distdiag tui --rank 5            start with rank 5
    distdiag tui --web               print an address for a browser

    Keys: 1-9 screens, Enter opens a rank, / filters, s sorts, [ ] replay, ? help, q quits.
    """
    from distdiag.store import rundir

    if as_json and not once:
        raise DistdiagError("--json needs --once", "`distdiag tui --once --json` prints one snapshot")
    if theme is not None and once:
        raise DistdiagError("--theme is for the live view", "leave it out with --once")
    ui = _ui(screen, rank, sort, reverse, filter_text, at_s, ascii_only)
    shape = _size(size)
    path = rundir.resolve(run)
    explicit_attempt = run is not None and Path(run).name.startswith("attempt_")
    newer = rundir.newer_launch(path)
    others = notes_on_latest(path) if path.is_symlink() else ()
    notes = [f"note: {note}" for note in (*([newer[1]] if newer is not None else ()), *others)]
    if once:
        for note in notes:
            say(note, err=True)
        return _once(path, ui, shape, as_json)
    if web:
        from distdiag.tui import web as serve

        return serve.serve(path, port, sys.argv[1:])
    ui.message = "; ".join(notes)  # until the first key
    return _watch(path, ui, hz, theme, follow_attempts=not explicit_attempt)


def _once(path: Path, ui: Ui, shape: tuple[int, int] | None, as_json: bool) -> int:
    from distdiag.tui import once as printer

    if as_json:
        snap = printer.take(path, ui)
        if snap.problem is not None:
            raise snap.problem
        say_json(printer.as_json(snap))
        return int(ExitCode.OK)
    snap = printer.print_once(path, ui, shape)
    return int(snap.problem.code if snap.problem is not None else ExitCode.OK)


def _watch(path: Path, ui: Ui, hz: float, theme: str | None, follow_attempts: bool) -> int:
    need(("textual",), "the live view")
    served = bool(os.environ.get("TEXTUAL_DRIVER"))  # by --web: its terminal is the browser
    if not served and not (sys.stdin.isatty() and sys.stdout.isatty()):
        hint = "`distdiag tui --once` prints one screen, also into a pipe"
        raise DistdiagError("the live view needs a terminal", hint)
    from distdiag.tui.app import DistdiagApp
    from distdiag.tui.draw.text import quote

    if not served:
        # Exported by some shells and CI systems, and stale after the first resize; Python would believe them more than
        # the terminal itself, and the view would be drawn for a size that is not there.
        os.environ.pop("COLUMNS", None)
        os.environ.pop("LINES", None)
    app = DistdiagApp(path, ui, hz=hz, theme=theme, follow_attempts=follow_attempts)
    if theme is not None and theme not in app.available_themes:
        raise DistdiagError(f"--theme {theme}: unknown theme", f"one of {', '.join(sorted(app.available_themes))}")
    app.run()
    say(
        f"distdiag: view closed, the job is not affected; reopen it with `distdiag tui {quote(app.snap.run)}`", err=True
    )
    return app.return_value_code
