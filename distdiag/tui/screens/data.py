"""Data: do ranks get their own, and equally many, batches?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame, RankRow
from distdiag.store.reader import Run
from distdiag.store.rows import LoaderRow
from distdiag.tui.data.order import Cached
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.draw import severity
from distdiag.tui.draw.charts import MIN_HEIGHT as CHART_HEIGHT
from distdiag.tui.draw.lines import BLANK, Line, Screenful, fitted, line, marked, width_of
from distdiag.tui.draw.table import Cell, Column, choose, header, row
from distdiag.tui.draw.text import clean, counted, integer, median_low, milliseconds, percent, place
from distdiag.tui.header import title_line
from distdiag.tui.panels import brief_panel
from distdiag.tui.screens import data_charts
from distdiag.tui.ui import Ui


@dataclass(frozen=True)
class DataData:
    """Loaders of every rank; fingerprints that more than one rank has."""

    loaders: dict[int, tuple[LoaderRow, ...]] = field(default_factory=dict)
    shared: frozenset[int] = frozenset()  # fingerprints of training data on more than one rank
    waited: data_charts.Waited | None = None  # of the rank under the cursor


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> DataData:
    by: dict[int, list[LoaderRow]] = {}
    for loader in run.loaders():
        by.setdefault(loader.rank, []).append(loader)
    prints = Counter(x.fingerprint for rows in by.values() for x in rows if x.in_training and x.fingerprint is not None)
    waited = data_charts.read(run, frame, request.rank, request.at_s) if request.rank is not None else None
    return DataData({r: tuple(v) for r, v in by.items()}, frozenset(k for k, n in prints.items() if n > 1), waited)


@dataclass(frozen=True)
class _Shown:
    row: RankRow
    loader: LoaderRow | None
    mark: severity.Mark
    data: DataData
    usual_length: int | None
    usual_size: int | None


def _yes(v: bool | int | None) -> str:
    return "–" if v is None else "yes" if v else "no"


def _compare(value: int | None, usual: int | None) -> Cell:
    """Return a number that should be equal on all ranks."""
    return (integer(value), "warning") if value is not None and usual is not None and value != usual else integer(value)


def _of(name: str):
    return lambda s: getattr(s.loader, name, None)


def _share(s: _Shown) -> Cell:
    r = s.row
    if r.data_ms is None or not r.step_ms:
        return "–"
    share = 100 * r.data_ms / r.step_ms
    return (percent(share), "warning") if share >= 20 else percent(share)


def _sampler(s: _Shown) -> Cell:
    if s.loader is None or s.loader.distributed_sampler is None:
        return "–"
    if not s.loader.distributed_sampler:
        return "none"
    return f"epoch {integer(s.loader.sampler_epoch)}"


def _fingerprint(s: _Shown) -> Cell:
    value = _of("fingerprint")(s)
    if value is None:
        return "–"
    bits = value & 0xFFFFFFFFFFFFFFFF
    text = f"{(bits ^ bits >> 24 ^ bits >> 48) & 0xFFFFFF:06x}"
    if value in s.data.shared:
        return f"{text} twice", "warning"
    if value == _of("previous_fingerprint")(s):  # a validation has the same data in every epoch
        return f"{text} again", "warning" if s.loader is not None and s.loader.in_training else "muted"
    return text, "muted"


def _left(s: _Shown) -> Cell:
    x = s.loader
    if x is None or x.batches is None:
        return "–"
    return f"{x.batches}/{x.length}" if x.length is not None else f"{x.batches}/?"


COLUMNS: tuple[Column[_Shown], ...] = (
    Column("rank", "rank", 5, "global rank", lambda s: str(s.row.rank)),
    Column(
        "data_ms", "wait ms", 8, "waiting for the next batch, median per step", lambda s: milliseconds(s.row.data_ms)
    ),
    Column("", "of step", 7, "share of the step time", _share),
    Column("", "batches", 11, "handed out in this epoch, of how many", _left),
    Column(
        "",
        "length",
        7,
        "batches per epoch: must agree under DDP",
        lambda s: _compare(_of("length")(s), s.usual_length),
        ">",
        3,
    ),
    Column(
        "",
        "batch",
        6,
        "batch size: unequal ones weigh gradients unequally",
        lambda s: _compare(_of("batch_size")(s), s.usual_size),
    ),
    Column("", "epoch", 5, "how often the loader was started", lambda s: integer(_of("epoch")(s)), ">", 4),
    Column("", "sampler", 10, "DistributedSampler and its epoch (does set_epoch move?)", _sampler, "<", 1),
    Column(
        "",
        "data",
        12,
        "fingerprint of the first batches; twice: another rank has it; again: as last epoch",
        _fingerprint,
        "<",
        2,
    ),
    Column("", "workers", 7, "DataLoader workers", lambda s: integer(_of("workers")(s)), ">", 5),
    Column("", "samples", 9, "length of the dataset", lambda s: integer(_of("dataset_length")(s)), ">", 6),
    Column("", "shuffle", 7, "whether the sampler shuffles", lambda s: _yes(_of("shuffle")(s)), "<", 9),
    Column("", "drop", 5, "drop_last", lambda s: _yes(_of("drop_last")(s)), "<", 8),
    Column("", "at", 18, "where the loader is iterated", lambda s: place(_of("file")(s), _of("line")(s)), "<", 7, 20),
    Column(
        "", "state", 8, "severity, or what became of the process", lambda s: severity.state_of(s.row, s.mark), "<", 0
    ),
)


class DataPage:
    name = "data"
    title = "data"
    question = "do ranks get their own, equally many batches?"

    def __init__(self) -> None:
        self.order = Cached(time.monotonic)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        ranks = self.order.ranks(snap, ui)
        chosen = ui.cursor.get("data")
        rank = chosen[0] if isinstance(chosen, tuple) and chosen[0] in ranks else next(iter(ranks), None)
        # a table that fills the screen leaves no line for charts
        return Request("data", ui.paused_at_s, rank if len(ranks) + CHART_HEIGHT < height else None)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        """Return `(rank, loader)`; a rank without a loader has one row."""
        data = snap.panel if isinstance(snap.panel, DataData) else DataData()
        out: list[Hashable] = []
        for rank in self.order.ranks(snap, ui):
            out += [(rank, x.loader) for x in data.loaders.get(rank, ())] or [(rank, -1)]
        return out

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, DataData) else DataData()
        lines = [title_line(snap, ui, width, self.title, self.question), *_totals(snap, data, width)]
        tail = brief_panel(snap, ui, width, height)
        items = self.items(snap, ui)
        room = max(1, height - len(lines) - len(tail) - 2)
        top, index = ui.window("data", items, room)
        chosen = choose(COLUMNS, width, 2)
        lines.append(header(chosen, 2, ui.sort, ui.reverse))
        cursor = None
        shown = _rows(snap, data, items[top : top + room])
        for nth, item in enumerate(shown, top):
            hit = f"row:{item.row.rank}"
            text = row(chosen, item, ((f" {item.mark.glyph}", item.mark.style, hit),), severity.stale(item.row), hit)
            if nth == index:
                cursor = len(lines)
                text = marked(text, width)
            lines.append(text)
        if len(items) > room:
            lines.append(line((f"   rows {top + 1:,}–{min(len(items), top + room):,} of {len(items):,}", "muted")))
        if snap.frame is not None and not data.loaders:
            lines.append(
                line(("   No DataLoader was seen: batches are counted where the job iterates one of torch's.", "muted"))
            )
        left = height - len(lines) - len(tail) - 2
        if data.waited is not None and left > CHART_HEIGHT:
            marks = tuple(
                (f.first_seen_s, severity.of_finding(f.severity).style) for f in snap.findings if f.first_seen_s
            )
            lines += [BLANK, *data_charts.lines(data.waited, width, left, marks, ui.ascii)]
        lines = [fitted(x, width) for x in lines[: height - len(tail)]]
        lines += [BLANK] * (height - len(lines) - len(tail))
        return Screenful([*lines, *tail][:height], room, cursor)


def _rows(snap: Snapshot, data: DataData, items: Sequence[Hashable]) -> list[_Shown]:
    if snap.frame is None:
        return []
    table, marks = snap.frame.table, snap.summary.marks
    where = {int(r): i for i, r in enumerate(table.numbers("rank"))}
    training = [x for rows in data.loaders.values() for x in rows if x.in_training]
    lengths, sizes = Counter(x.length for x in training), Counter(x.batch_size for x in training)
    out = []
    for item in items:
        assert isinstance(item, tuple)
        rank, number = item
        loader = next((x for x in data.loaders.get(rank, ()) if x.loader == number), None)
        used = loader is not None and bool(loader.in_training)
        length = lengths.most_common(1)[0][0] if used and lengths else None
        batch = sizes.most_common(1)[0][0] if used and sizes else None
        out.append(_Shown(table.row(where[rank]), loader, marks[where[rank]], data, length, batch))
    return out


def _totals(snap: Snapshot, data: DataData, width: int) -> list[Line]:
    """Return a summary over all ranks: the share of the step spent waiting for data, and whether lengths agree."""
    if snap.frame is None:
        return [BLANK]
    table = snap.frame.table
    shares = [
        100 * d / s
        for d, s in zip(table.numbers("data_ms"), table.numbers("step_ms"), strict=True)
        if d == d and s and s == s
    ]
    training = [x for rows in data.loaders.values() for x in rows if x.in_training]
    lengths = {x.length for x in training if x.length is not None}
    parts: list[str | tuple[str, str]] = [f" waiting for data: {percent(median_low(shares))} of step time (median)"]
    if lengths:
        agree = len(lengths) == 1
        text = (
            f"lengths agree: {counted(min(lengths), 'batch', 'batches')}"
            if agree
            else f"lengths differ: {min(lengths)} to {max(lengths)} batches"
        )
        parts.append((f"   {text}", "" if agree else "error"))
    if data.shared:
        parts.append(("   the same data on several ranks", "warning"))
    at = {clean(place(x.file, x.line)) for x in training if x.file}
    if len(at) == 1:
        parts.append((f"   loader at {at.pop()}", "muted"))
    while len(parts) > 1 and width_of(line(*parts)) > width:
        parts.pop()
    return [fitted(line(*parts), width)]
