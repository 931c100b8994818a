"""`distdiag tui --once`: one screen as text, without the terminal library; `--json`: one snapshot for a program."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from distdiag.diagnosis.model.findings import Finding, State, rank_list
from distdiag.errors import DistdiagError
from distdiag.store.opening import RunUnreadable
from distdiag.store.reader import open_run
from distdiag.streams import say, wants_colour
from distdiag.terms.untrusted import encodable
from distdiag.tui.data.snapshot import Request, Snapshot, Taker
from distdiag.tui.data.state import job_state
from distdiag.tui.draw.lines import BLANK, Line, ascii_line, fitted, plain
from distdiag.tui.draw.palette import code_256
from distdiag.tui.draw.palette import colours as area_colours
from distdiag.tui.draw.text import quote
from distdiag.tui.screens import Page, pages, readers
from distdiag.tui.ui import Ui

SCHEMA = "distdiag.snapshot/1"
PIPE_WIDTH = 110  # where nobody's terminal sets a width

# The sixteen colours follow the terminal's own palette, light or dark.
_CODES = {
    "muted": "2", "bold": "1", "error": "31", "warning": "33", "title": "1", "head": "4", "accent": "36", "cursor": "7",
    "data": "33", "forward": "36", "backward": "34", "optimizer": "35", "other": "2", "key": "1",
}  # fmt: skip
_COLOURS = frozenset({"error", "warning", "accent", "data", "forward", "backward", "optimizer"})


def take(run: Path, ui: Ui, page: Page | None = None, width: int = 0, height: int = 0) -> Snapshot:
    """Return one snapshot, for one page or without any screen; for an unreadable run it has the reason."""
    try:
        with open_run(run) as opened:
            taker = Taker(opened, readers())
            base = taker.take(Request("", ui.paused_at_s))  # the frame alone decides which ranks are shown
            return base if page is None else taker.take(page.request(base, ui, width, height))
    except RunUnreadable as e:
        return Snapshot(run, problem=e)


def screen(run: Path, ui: Ui, width: int, height: int | None) -> tuple[list[Line], Snapshot]:
    """Return the lines of one page; all rows if no height is given."""
    page = pages()[ui.page]
    ui = replace(ui, interactive=False)
    tall = height
    if tall is None:
        # room for every row: the frame says how many there are
        first = take(run, ui, page, width, 24)
        rows = first.summary.n + sum(len(f.where) + len(f.names) + 24 for f in first.findings)
        tall = max(24, rows + 40)
        if ui.page == "stacks":
            tall += len(getattr(first.panel, "lines", ()))
    snap = take(run, ui, page, width, tall)
    lines = [fitted(x, width) for x in page.render(snap, ui, width, tall).lines]
    if ui.ascii:
        lines = [ascii_line(x) for x in lines]
    return (lines if height is not None else _without_gaps(lines)), snap


def _without_gaps(lines: list[Line]) -> list[Line]:
    """Remove the filler between the table and the findings, which is only useful on a screen."""
    out: list[Line] = []
    for x in lines:
        if plain(x) or (out and plain(out[-1])):
            out.append(x if plain(x) else BLANK)
    while out and not plain(out[-1]):
        out.pop()
    return out


def coloured(text: Line, colours: bool) -> str:
    """Return the line with ANSI codes; without `colours` (NO_COLOR) bold, dim and underlined remain."""
    out = []
    room = len(plain(text))  # in characters: what follows is padding
    for t, style, _ in text:
        t, room = t[:room], max(0, room - len(t))
        codes = [_CODES[s] for s in style.split() if s in _CODES and (colours or s not in _COLOURS)]
        if colours:
            codes += _area_codes(style)
        out.append(f"\x1b[{';'.join(codes)}m{t}\x1b[0m" if codes and t.strip() else t)
    return "".join(out)


def _area_codes(style: str) -> list[str]:
    """Return the codes of the fixed colours of areas: 256 colours, which every terminal has."""
    out = []
    for name in style.split():
        text, ground = area_colours(name) or (None, None)
        out += [f"38;5;{code_256(text)}"] if text else []
        out += [f"48;5;{code_256(ground)}"] if ground else []
    return out


def print_once(run: Path, ui: Ui, size: tuple[int, int] | None = None) -> Snapshot:
    """Print one screen; at a terminal as large as it is (one line stays for the prompt), in a pipe all rows.

    Raises:
        DistdiagError: the rank to print is not part of the run.
    """
    escapes, colours = wants_colour()
    ui = replace(ui, colour=colours)
    if size is not None:
        width, height = size
    elif sys.stdout.isatty():
        columns, rows = shutil.get_terminal_size((80, 24))
        width, height = columns, max(10, rows - 1)
    else:
        width, height = max(60, shutil.get_terminal_size((PIPE_WIDTH, 24)).columns), None
    lines, snap = screen(run, ui, width, height)
    ranks = snap.summary.layout.ranks
    if ui.page == "rank" and snap.frame is not None and ui.rank not in ranks:
        text = f"rank {ui.rank} is not part of this run, which has {rank_list(ranks)}"
        raise DistdiagError(text, f"`distdiag tui {quote(snap.run)} --once` prints all its ranks")
    for x in lines:
        say(coloured(x, colours) if escapes else plain(x), drawn=True)
    return snap


class SnapshotJson(msgspec.Struct, kw_only=True):
    """What `--once --json` and the key `e` write; null is "not measured"."""

    schema: str = SCHEMA
    run: str
    state: str
    state_text: str
    next_command: str | None
    monitor: str | None
    heartbeat_age_s: float | None
    t_s: float | None
    paused_at_s: float | None
    world_size: int | None
    ranks_seen: int
    nodes: int
    step: int | None
    max_steps: int | None
    step_ms: float | None
    self_ms: dict[str, float | None]
    samples_per_s: float | None
    loss: float | None
    waiting: list[dict[str, Any]]
    findings: tuple[Finding, ...]
    ranks: list[dict[str, Any]]


def as_json(snap: Snapshot) -> bytes:
    """Return the snapshot as one JSON object, its schema first."""
    s, job = snap.summary, job_state(snap)
    max_steps = snap.number("max_steps")
    body = SnapshotJson(
        run=encodable(str(snap.run)),
        state=State.FAILED
        if snap.killed
        else (snap.frame.state if snap.frame is not None else snap.meta.get("state") or "waiting"),
        state_text=job.text,
        next_command=job.do or None,
        monitor=snap.monitor,
        heartbeat_age_s=snap.heartbeat_age_s,
        t_s=snap.t_s,
        paused_at_s=snap.at_s,
        world_size=snap.world_size or None,
        ranks_seen=s.reported,
        nodes=len(s.layout.nodes),
        step=s.step,
        max_steps=None if max_steps is None else int(max_steps),
        step_ms=s.step_ms,
        self_ms={"p50": s.self_p50, "p99": s.self_p99, "max": s.self_max},
        samples_per_s=s.samples_per_s,
        loss=s.loss,
        waiting=[{"op": op, "group": g, "seq": q, "bytes": b, "ranks": n} for (op, g, q, b), n in s.waiting],
        findings=snap.findings,
        ranks=[] if snap.frame is None else list(map(msgspec.structs.asdict, snap.frame.ranks)),
    )
    return msgspec.json.format(msgspec.json.encode(body), indent=1)
