"""Data: do ranks get their own, and equally many, batches?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distdiag.store.frames import RankRow
from distdiag.store.rows import LoaderRow
from distdiag.terms.quantiles import median_low
from distdiag.tui.data import loader_data
from distdiag.tui.data.loader_data import LoaderData, Waited
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.draw import severity
from distdiag.tui.draw.charts import MIN_HEIGHT as CHART_HEIGHT
from distdiag.tui.draw.charts import Chart, Curve, grid
from distdiag.tui.draw.lines import BLANK, Line, Screenful, line, width_of
from distdiag.tui.draw.table import Cell, Column, choose, header, row
from distdiag.tui.draw.text import MISSING, clean, counted, integer, milliseconds, percent, place
from distdiag.tui.screens.page import RankedPage, lead
from distdiag.tui.ui import Ui


@dataclass(frozen=True)
class _Shown:
    row: RankRow
    loader: LoaderRow | None
    mark: severity.Mark
    data: LoaderData
    usual_length: int | None
    usual_size: int | None

    def of(self, name: str) -> Any:
        return getattr(self.loader, name, None)


def _yes(v: bool | int | None) -> str:
    return MISSING if v is None else "yes" if v else "no"


def _compare(value: int | None, usual: int | None) -> Cell:
    """Return a number that should be equal on all ranks."""
    return (integer(value), "warning") if value is not None and usual is not None and value != usual else integer(value)


def _share(s: _Shown) -> Cell:
    if s.row.data_ms is None or not s.row.step_ms:
        return MISSING
    share = 100 * s.row.data_ms / s.row.step_ms
    return (percent(share), "warning") if share >= 20 else percent(share)


def _sampler(s: _Shown) -> Cell:
    if s.loader is None or s.loader.distributed_sampler is None:
        return MISSING
    return f"epoch {integer(s.loader.sampler_epoch)}" if s.loader.distributed_sampler else "none"


def _fingerprint(s: _Shown) -> Cell:
    value = s.of("fingerprint")
    if value is None:
        return MISSING
    bits = value & 0xFFFFFFFFFFFFFFFF
    text = f"{(bits ^ bits >> 24 ^ bits >> 48) & 0xFFFFFF:06x}"
    if value in s.data.shared:
        return f"{text} twice", "warning"
    if value == s.of("previous_fingerprint"):  # a validation has the same data in every epoch
        return f"{text} again", "warning" if s.of("in_training") else "muted"
    return text, "muted"


def _left(s: _Shown) -> Cell:
    if s.of("batches") is None:
        return MISSING
    return f"{s.of('batches')}/{s.of('length') if s.of('length') is not None else '?'}"


_C = Column[_Shown]
COLUMNS = (
    _C("rank", "rank", 5, "global rank", lambda s: str(s.row.rank)),
    _C("data_ms", "wait ms", 8, "waiting for the next batch, median per step", lambda s: milliseconds(s.row.data_ms)),
    _C("", "of step", 7, "share of the step time", _share),
    _C("", "batches", 11, "handed out in this epoch, of how many", _left),
    _C("", "length", 7, "batches per epoch: must agree under DDP", lambda s: _compare(s.of("length"), s.usual_length), ">", 3),
    _C("", "batch", 6, "batch size: unequal ones weigh gradients unequally", lambda s: _compare(s.of("batch_size"), s.usual_size)),
    _C("", "epoch", 5, "how often the loader was started", lambda s: integer(s.of("epoch")), ">", 4),
    _C("", "sampler", 10, "DistributedSampler and its epoch (does set_epoch move?)", _sampler, "<", 1),
    _C("", "first batch", 12, "fingerprint of the first batches; twice: another rank has the same; again: the same as last epoch", _fingerprint, "<", 2),
    _C("", "workers", 7, "DataLoader workers", lambda s: integer(s.of("workers")), ">", 5),
    _C("", "samples", 9, "length of the dataset", lambda s: integer(s.of("dataset_length")), ">", 6),
    _C("", "shuffle", 7, "whether the sampler shuffles", lambda s: _yes(s.of("shuffle")), "<", 9),
    _C("", "drop", 5, "drop_last", lambda s: _yes(s.of("drop_last")), "<", 8),
    _C("", "at", 18, "where the loader is iterated", lambda s: place(s.of("file"), s.of("line")), "<", 7, 20),
    _C("", "state", 8, "severity, or what became of the process", lambda s: severity.state_of(s.row, s.mark), "<", 0),
)  # fmt: skip


class DataPage(RankedPage[LoaderData]):
    name = title = "data"
    question = "do ranks get their own, equally many batches?"
    empty = LoaderData
    read = staticmethod(loader_data.read)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        ranks = self.order.ranks(snap, ui)
        chosen = ui.cursor.get("data")
        rank = chosen[0] if isinstance(chosen, tuple) and chosen[0] in ranks else next(iter(ranks), None)
        # a table that fills the screen leaves no line for charts
        return Request("data", ui.paused_at_s, rank if len(ranks) + CHART_HEIGHT < height else None)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        """Return `(rank, loader)`; a rank without a loader has one row."""
        loaders = self.data(snap).loaders
        ranks = self.order.ranks(snap, ui)
        return [(rank, x) for rank in ranks for x in [row.loader for row in loaders.get(rank, ())] or [-1]]

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = self.data(snap)
        sheet = self.sheet(snap, ui, width, height)
        sheet.add(_totals(snap, data, width))
        room = sheet.left - 2
        chosen = choose(COLUMNS, width, 2)
        sheet.add(header(chosen, 2, ui.sort, ui.reverse))

        def rows(items: Sequence[Hashable]) -> Iterator[Line]:
            for item in _rows(snap, data, items):
                hit = f"row:{item.row.rank}"
                yield row(chosen, item, lead(item.mark, hit), severity.stale(item.row), hit)

        sheet.list(ui, "data", self.items(snap, ui), room, rows)
        if snap.frame is not None and not data.loaders:
            sheet.note("   No DataLoader was seen: batches are counted where the job iterates one of torch's.")
        if data.waited is not None and sheet.left - 2 > CHART_HEIGHT:
            sheet.add(BLANK, *_charts(data.waited, width, sheet.left - 2, snap.finding_marks, ui.ascii))
        return sheet.done()


def _rows(snap: Snapshot, data: LoaderData, items: Sequence[Any]) -> Iterator[_Shown]:
    if snap.frame is None:
        return
    lengths, sizes = (
        Counter(getattr(x, name) for x in data.training).most_common(1) for name in ("length", "batch_size")
    )
    for rank, number in items:
        i = snap.summary.layout.row_of[rank]
        loader = next((x for x in data.loaders.get(rank, ()) if x.loader == number), None)
        used = loader is not None and bool(loader.in_training)
        usual = [found[0][0] if used and found else None for found in (lengths, sizes)]
        yield _Shown(snap.frame.table.row(i), loader, snap.summary.marks[i], data, *usual)


def _totals(snap: Snapshot, data: LoaderData, width: int) -> Line:
    """Return a summary over all ranks: the share of the step spent waiting for data, and whether lengths agree."""
    if snap.frame is None:
        return BLANK
    both = zip(*(snap.frame.table.numbers(name) for name in ("data_ms", "step_ms")), strict=True)
    shares = [
        100 * data_ms / step_ms for data_ms, step_ms in both if data_ms == data_ms and step_ms and step_ms == step_ms
    ]
    lengths = {x.length for x in data.training if x.length is not None}
    parts: list[str | tuple[str, str]] = [f" waiting for data: {percent(median_low(shares))} of step time (median)"]
    if len(lengths) == 1:
        parts.append(f"   lengths agree: {counted(min(lengths), 'batch', 'batches')}")
    elif lengths:
        parts.append((f"   lengths differ: {min(lengths)} to {max(lengths)} batches", "error"))
    if data.shared:
        parts.append(("   the same data on several ranks", "warning"))
    at = {clean(place(x.file, x.line)) for x in data.training if x.file}
    if len(at) == 1:
        fed = all(x.fed for x in data.training)
        parts.append((f"   {'no loader seen; batches enter the model' if fed else 'loader'} at {at.pop()}", "muted"))
    while len(parts) > 1 and width_of(line(*parts)) > width:
        parts.pop()
    return line(*parts)


def _charts(
    waited: Waited, width: int, height: int, marks: tuple[tuple[float, str], ...], ascii_only: bool
) -> list[Line]:
    """Return a line that names the rank, and its charts; empty if they do not fit."""
    times = waited.times
    if len(times) < 2:
        return []
    own = Curve(f"rank {waited.rank}", times, waited.own_ms, "accent")
    others = Curve("others", times, waited.others_ms, "area-data")
    curves = (others, own) if any(v is not None for v in waited.others_ms) else (own,)
    charts = [
        Chart("data wait", "ms", curves, milliseconds, marks=marks,
              help="waiting for the next batch, of the rank under the cursor and the median of the others"),
        Chart("data wait", "of step time", (Curve("", times, waited.share_pct, "area-hot", not ascii_only),), percent,
              marks=marks, help="share of the step that the rank under the cursor waits for its batch"),
    ]  # fmt: skip
    made = grid(charts, times[0], times[-1], width - 1, height - 1, ascii_only)
    name = line((f" rank {waited.rank}", "bold"), (f"   last {len(times)} steps", "muted"))
    return [name, *made] if made else []
