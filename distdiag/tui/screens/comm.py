"""Comm: is the network the cause, or a rank?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from distdiag.diagnosis.model.findings import rank_list
from distdiag.store.frames import Frame
from distdiag.tui.data import comm_data
from distdiag.tui.data.comm_data import WINDOW_STEPS, CommData, InFlight, OpStats, probe_for
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.draw import bars
from distdiag.tui.draw.charts import MIN_HEIGHT as CHART_HEIGHT
from distdiag.tui.draw.charts import Chart, Curve, grid
from distdiag.tui.draw.lines import BLANK, Line, Part, Screenful, explained, fitted, line, rule
from distdiag.tui.draw.severity import WARN
from distdiag.tui.draw.table import Cell, Column, choose, header, row
from distdiag.tui.draw.text import (
    MISSING,
    SPARKS,
    cells,
    clean,
    clip,
    counted,
    decimal,
    fit,
    integer,
    milliseconds,
    percent,
    seconds,
    size,
    three_digits,
)
from distdiag.tui.panels import footer_panel
from distdiag.tui.screens.page import Page, Sheet
from distdiag.tui.ui import Ui

ROWS_OF_STRIP = 12  # lines of the screen for each line of arrivals
ROW_OF_CHARTS = 13  # lines of the charts of one operation
MATTERS = 0.02  # share of step time below which collectives are not worth a verdict
EXPOSED = 0.3  # the limit of the finding comm_bound


def _ms(us: float | None) -> str:
    return decimal(None if us is None else us / 1e3, 2)


def _gbps(v: float | None) -> str:
    return MISSING if v is None else decimal(v, 1 if v >= 1 else 2)


def _late(o: OpStats) -> str:
    return MISSING if o.late_rank is None else f"{o.late_rank} in {100 * o.late_count / o.late_of:.0f}%"


_C = Column[OpStats]
COLUMNS = (
    _C("", "op", 11, "collective", lambda o: clean(o.op), "<", 0, 4),
    _C("", "group", 10, "process group", lambda o: clean(o.group), "<", 0, 6),
    _C("", "n/step", 6, "how many per step", lambda o: decimal(o.per_step, 0 if (o.per_step or 0) >= 1 else 2), ">", 2),
    _C("", "size", 9, "bytes of one rank's tensor, as torch counts them", lambda o: size(o.bytes)),
    _C("", "p50 ms", 7, "median time on the rank that arrived last: the transfer", lambda o: _ms(o.p50_us)),
    _C("", "p99 ms", 7, "99 % are shorter; only of 100 and more", lambda o: _ms(o.p99_us), ">", 4),
    _C("", "algbw", 6, "size / time, GB/s (10^9 bytes)", lambda o: _gbps(o.algbw_gbps), ">", 3),
    _C("", "busbw", 6, "algbw x the operation's factor, comparable to the link", lambda o: _gbps(o.busbw_gbps), ">", 1),
    _C("", "skew ms", 8, "median of last arrival - first arrival", lambda o: _ms(o.skew_p50_us)),
    _C("", "late rank", 10, "who arrives last, and in how many of them", _late, "<", 0, 8),
    _C("", "seq", 8, "newest sequence number", lambda o: integer(o.newest_seq or None), ">", 6),
    _C("", "ranks", 6, "ranks of the group", lambda o: integer(o.ranks), ">", 7),
)  # fmt: skip
_F = Column[InFlight]
FLIGHT = (
    _F("", "in flight", 14, "collective that ranks wait in now", lambda f: clean(f.op), "<", 0, 8),
    _F("", "group", 10, "process group", lambda f: clean(f.group), "<", 0, 14),
    _F("", "seq", 8, "sequence number in its group", lambda f: integer(f.seq)),
    _F("", "size", 9, "bytes", lambda f: size(f.bytes), ">", 2),
    _F("", "age", 12, "of the rank that waits longest", lambda f: seconds(f.age_s)),
    _F(
        "",
        "entered",
        14,
        "ranks that are in it",
        lambda f: f"{len(f.entered):,}" + (f" of {f.size:,}" if f.size else ""),
        "<",
        1,
    ),
    _F("", "waits for", 16, "members that have not entered it", lambda f: _missing(f), "<", 0, 60),
)


def _missing(f: InFlight) -> Cell:
    if not f.size:
        return "members not known"
    if not f.missing:
        return "none"
    return rank_list(f.missing), "error" if (f.age_s or 0.0) > STALE_S else ""


def verdict(data: CommData, snap: Snapshot) -> Line:
    """Return whether the network or a rank is the cause: the transfer time of the heaviest operation against its arrival skew."""
    if not data.ops:
        return BLANK
    o = next((o for o in data.ops if o.p50_us), data.ops[0])
    if o.exposed_us is not None:
        return _gradients(o)
    if (share := _share_of_step(o, snap)) is not None and share < MATTERS:
        text = f" collectives take {percent(100 * share)} of step time: neither network nor lateness in them matters"
        return line((" ·", "muted"), text)
    if not o.p50_us:
        text = " no transfer time is known yet: whether the network or a rank is the cause is not judged"
        return line((" ·", "muted"), (text, "muted"))
    if o.skew_p50_us is None:
        return line((" · no skew measured yet: it needs the arrival times of all ranks", "muted"))
    ratio = o.skew_p50_us / o.p50_us
    if ratio >= 3 and o.skew_p50_us >= 1000:
        often = o.late_of and o.late_count / o.late_of >= 0.5
        who = f"See rank {o.late_rank}." if often else "No single rank is late: jitter."
        text = f" skew is {ratio:.0f}x the transfer time: the network is not the cause. {who}"
        return line((f" {WARN.glyph}", "warning"), text)
    reached = probe_for(data, o)
    if reached and o.busbw_gbps is not None:
        share = 100 * o.busbw_gbps / reached
        mark = (f" {WARN.glyph}", "warning") if share < 70 else (" ·", "muted")
        return line(mark, f" the transfers reach {share:.0f}% of what the probe measured here ({_gbps(reached)} GB/s)")
    text = f" skew is {ratio:.1f}x the transfer time; `distdiag probe` says what this network can do"
    return line((" ·", "muted"), text)


def _gradients(o: OpStats) -> Line:
    """Return the cost of DDP's gradients: only exposed communication costs."""
    share = 100 * (o.exposed_share or 0.0)
    much = share >= 100 * EXPOSED
    sent = f"{size(o.bytes)} in {counted(o.buckets, 'bucket')}"
    text = f" gradients: {sent}, {_ms(o.p50_us)} ms a step, {_ms(o.exposed_us)} exposed: {percent(share)} of a step"
    return line((f" {WARN.glyph if much else '·'}", "warning" if much else "muted"), text)


def _share_of_step(o: OpStats, snap: Snapshot) -> float | None:
    """Return the share of step time of an operation, waiting for late ranks included; None if it is not known."""
    step_ms = snap.summary.step_ms
    if not step_ms or o.per_step is None or o.p50_us is None:
        return None
    return o.per_step * (o.p50_us + (o.skew_p50_us or 0.0)) / 1e3 / step_ms


def summary_lines(data: CommData, width: int, at_most: int, ui: Ui) -> list[Line]:
    """Return the collectives panel of the home screen."""
    if not data.ops:
        return []
    chosen = choose(COLUMNS, width, 0)
    out = [rule(width, f"collectives, last {data.steps or WINDOW_STEPS} steps; GB/s = 10^9 bytes "), header(chosen)]
    out += [row(chosen, o) for o in data.ops[: at_most - 2]]
    left = len(data.ops) - (at_most - 2)
    if left > 0:
        out.append(line((f"   {left} more: {ui.opens('2', 'comm')}", "muted", "do:show('comm')")))
    return out


class CommPage(Page[CommData]):
    name = title = "comm"
    question = "is the network the cause, or a rank?"
    empty = CommData
    read = staticmethod(comm_data.read)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return [o.key for o in self.data(snap).ops]

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data, job = self.data(snap), job_state(snap)
        sheet = Sheet(width, height, footer_panel(snap, ui, job, width, max(3, min(height // 3, 8))))
        sheet.add(self.head(snap, ui, width, f"last {data.steps or WINDOW_STEPS} steps"))
        sheet.add(_share(snap, data) if snap.frame is not None else BLANK)
        flights = _flights(data, width, max(3, (height - len(sheet.panel)) // 3))
        chosen = ui.index("comm", self.items(snap, ui)) if data.ops else 0
        strip = arrivals(snap.frame, data, chosen, width, max(1, height // ROWS_OF_STRIP))
        self._table(sheet, data, snap, ui, sheet.left - len(flights) - len(strip) - 5)
        if data.ops:
            sheet.note(" bandwidth in GB/s (10^9 B/s), transfer only: waiting for late ranks is in skew")
            sheet.add(_reached(data, data.ops[chosen], ui, width), verdict(data, snap))
        sheet.add(*strip, BLANK, *flights)
        if data.ops and snap.t_s is not None and sheet.left - 2 > CHART_HEIGHT:
            left, several = sheet.left - 2, [o for o in (data.ops[chosen], *data.ops) if len(o.history) > 1]
            several = list(dict.fromkeys(several))[: max(1, left // ROW_OF_CHARTS)]
            for o in several:
                made = charts(o, snap.t_s, width, left // len(several) - 1, snap.finding_marks, ui.ascii)
                sheet.add(BLANK, *made)
        sheet.lines = sheet.lines[: height - len(sheet.panel)]
        sheet.panel = footer_panel(snap, ui, job, width, max(len(sheet.panel), height - len(sheet.lines) - 1))
        return sheet.done()

    def _table(self, sheet: Sheet, data: CommData, snap: Snapshot, ui: Ui, room: int) -> None:
        if not data.ops:
            text = "   No collectives yet. They appear after the first step whose collectives all ranks completed."
            sheet.add(BLANK)
            sheet.note(clip(text, sheet.width))
            sheet.note("   Is the recorder attached before `init_process_group`?")
            return sheet.add(BLANK)
        chosen, numbers = choose(COLUMNS, sheet.width, 0), {o.key: i for i, o in enumerate(data.ops)}
        sheet.add(header(chosen))

        def rows(items: Sequence[Hashable]) -> Iterator[Line]:
            return (row(chosen, data.ops[numbers[key]], hit=f"item:{numbers[key]}") for key in items)  # type: ignore[index]

        sheet.list(ui, "comm", self.items(snap, ui), room, rows, " rows")


def _share(snap: Snapshot, data: CommData) -> Line:
    s = snap.summary
    share = percent(100 * s.wait_mean / s.step_ms) if s.wait_mean is not None and s.step_ms else MISSING
    named = [f"{clean(name)} ({counted(ranks, 'rank')})" for name, ranks, _ in data.groups[:4]]
    named += [f"{len(data.groups) - 4} more"] if len(data.groups) > 4 else []
    return line(f" waiting for other ranks: {share} of step time   groups: {', '.join(named) or 'none recorded yet'}")


def _reached(data: CommData, o: OpStats, ui: Ui, width: int) -> Line:
    reached = probe_for(data, o)
    if not o.bytes:
        return line((f" {clean(o.op)} has no bandwidth: it moves no tensor", "muted"))
    if reached is None:
        return line((f" no probe of {clean(o.op)} at {size(o.bytes)} in this run: {ui.opens('8', 'probes')}", "muted"))
    text = f" probe in this run: busbw {_gbps(reached)} GB/s at {size(o.message_bytes)}"
    if not o.busbw_gbps:
        return line(text)
    share = o.busbw_gbps / reached
    text += f" → {100 * share:.0f}% of it reached"
    room = min(20, width - cells(text) - 3)
    if room < 5:
        return line(text)
    # its end is what the probe reached
    return line(text, "  ", *bars.gauge(share, room, colour=ui.drawn, style="fill" if share >= 0.7 else "hot"))


def _flights(data: CommData, width: int, room: int) -> list[Line]:
    if not data.in_flight:
        return [line((" in flight: nothing", "muted"))]
    chosen = choose(FLIGHT, width, 0)
    out = [header(chosen), *(row(chosen, f) for f in data.in_flight[: room - 1])]
    left = len(data.in_flight) - (room - 1)
    return [*out, line((f" {left} more in flight", "muted"))] if left > 0 else out


LEAST_SPREAD_MS = 0.5  # between first and last arrival; below it the picture would show noise
STALE_S = 5.0  # from this age on a collective in flight is drawn as an error
ARRIVALS = "when the ranks arrive, after the first of them (of each rank the median); a higher bar is more ranks"
Marks = tuple[tuple[float, str], ...]  # moments and their style


def arrivals(frame: Frame | None, data: CommData, at: int, width: int, room: int) -> list[Line]:
    """Draw who arrives when, from the first rank to the last: at a step's first collective, and at each operation.

    The operation `at` the cursor is drawn first; `room` is the most lines.
    """
    table = frame.table if frame is not None else None
    of_step = [] if table is None else list(zip(table.numbers("rank"), table.numbers("late_ms"), strict=True))
    timed = [o for o in (*data.ops[at : at + 1], *data.ops[:at], *data.ops[at + 1 :]) if len(o.arrivals) > 1]
    wanted = [(_name(o), list(o.arrivals)) for o in timed[:room]]
    known = [(int(rank), ms) for rank, ms in of_step if ms == ms]
    if len(known) > 1 and (room > 1 or not wanted) and data.ops:
        wanted = [("a step's first", known), *wanted[: room - 1]]
    if not wanted:
        return []
    lead = max(cells(name) for name, _ in wanted)
    return [_strip(name, lead, sorted((ms, rank) for rank, ms in times), width) for name, times in wanted]


def _name(o: OpStats) -> str:
    return clip(f"{clean(o.op)} {size(o.bytes) if o.bytes is not None else ''}".rstrip(), 24)


def _strip(name: str, lead_cells: int, known: list[tuple[float, int]], width: int) -> Line:
    last_ms = known[-1][0]
    lead = f" arrivals  {fit(name, lead_cells)}  0 "
    if last_ms < LEAST_SPREAD_MS:
        return explained(line((lead, "muted"), (f"all within {last_ms:.2f} ms", "muted")), "arrivals, ms", ARRIVALS)
    names = "   ".join(f"rank {rank} +{milliseconds(ms)} ms" for ms, rank in reversed(known[-3:]) if ms > last_ms / 4)
    tail = f" {milliseconds(last_ms)} ms   {names}"
    room = min(60, width - cells(lead) - cells(tail) - 1)
    if room < 12:
        return fitted(line((f" arrivals  {fit(name, lead_cells)}  ", "muted"), names), width)
    in_cell = Counter(min(room - 1, int(ms / last_ms * room)) for ms, _ in known)
    most = max(in_cell.values())
    parts: list[Part] = []
    for cell in range(room):
        n = in_cell.get(cell, 0)
        glyph = "·" if not n else SPARKS[min(len(SPARKS) - 1, round(n / most * (len(SPARKS) - 1)))]
        parts.append((glyph, "muted" if not n else "warning" if cell >= room / 4 else "accent", ""))
    return explained(line((lead, "muted"), *parts, (tail, "")), "arrivals, ms", ARRIVALS)


def charts(o: OpStats, now: float, width: int, height: int, marks: Marks, ascii_only: bool) -> list[Line]:
    """Draw an operation's transfer time, skew and bandwidth over the steps in the window; empty if they do not fit."""
    times = [t for t, _, _ in o.history]
    durations = [None if d is None else d / 1e3 for _, d, _ in o.history]
    skews = [None if s is None else s / 1e3 for _, _, s in o.history]
    found = [
        Chart("transfer", "ms", (Curve("", times, durations, "accent"),), three_digits, marks=marks,
              help="on the rank that arrived last: waiting for late ranks is not in it"),
        Chart("skew", "ms", (Curve("", times, skews, "area-hot", not ascii_only),), three_digits, marks=marks,
              help="last arrival - first arrival: the first rank waits as long"),
    ]  # fmt: skip
    if o.busbw_gbps and o.p50_us:
        factor = o.busbw_gbps * o.p50_us / 1e3
        rates = [factor / d if d else None for d in durations]
        about = "size / time x the operation's factor, comparable to the link"
        found.append(
            Chart("busbw", "GB/s", (Curve("", times, rates, "accent"),), three_digits, marks=marks, help=about)
        )
    found = [c for c in found if any(v is not None for v in c.curves[0].values)]
    if not found or len(times) < 2:
        return []
    end = min(now, times[-1] + 0.25 * (times[-1] - times[0]))  # however long the job has been stuck since then
    made = grid(found, times[0], end, width - 1, height - 1, ascii_only)
    name = f" {clean(o.op)} {size(o.bytes) if o.bytes is not None else ''}".rstrip()
    return [line((name, "bold"), (f"   group {clean(o.group)}", "muted")), *made] if made else []
