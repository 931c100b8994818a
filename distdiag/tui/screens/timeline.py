"""Timeline: the last seconds of all ranks as lanes. Who stopped first, and who waits for it?

A step is recorded as how long each phase took, not when: phases are drawn in the order of a training loop, the waiting
after backward, where DDP waits. What a rank does now is drawn from the newest frame.
"""

from __future__ import annotations

from distdiag.diagnosis.model.findings import Where
from distdiag.diagnosis.model.snapshot import Life
from distdiag.store.frames import RankRow
from distdiag.tui.data import timeline_data
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.data.timeline_data import Step, TimelineData
from distdiag.tui.draw import bars, severity
from distdiag.tui.draw.lines import BLANK, Line, Part, Screenful, explained, line, merged
from distdiag.tui.draw.palette import LETTERS
from distdiag.tui.draw.text import cells, clean, clip, clock, fit, place, seconds
from distdiag.tui.panels import footer_panel
from distdiag.tui.screens.page import RankedPage, Sheet
from distdiag.tui.ui import Ui

LABEL = 10
TALLEST = 6  # lines of one lane: five of colour and an empty one
COMM = "collectives that all ranks completed: thin from the first arrival to the last, thick the transfer"
# seconds that the screen shows; + and - go through them
SPANS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)  # fmt: skip
_ORDER = ("data", "forward", "backward", "wait", "optimizer", "other")  # in which a step is drawn
_OVER = ("ENDED", "FAILED", "LOST", "MONITOR GONE")
_STILL = severity.GONE | {Life.FINISHED, Life.STOPPED, Life.DETACHED, Life.MISSING}  # no longer in any phase

Segment = tuple[float, float, str, str]  # begin and end in seconds of the run, name of the area, text inside


def of_step(step: Step) -> list[Segment]:
    """Return the phases of one step, in the order of a training loop."""
    at = step.t_end_s - (step.step_ms or 0.0) / 1e3
    parts = dict(bars.phases_of(step))
    out: list[Segment] = []
    for name in _ORDER:
        if parts[name] > 0:
            out.append((at, min(step.t_end_s, at + parts[name] / 1e3), name, ""))
            at += parts[name] / 1e3
    return out


def now_of(row: RankRow, after: float, now: float, waited: Where | None = None) -> list[Segment]:
    """Return what a rank has done since its last step, which ended at `after` (seconds of the run).

    `waited`: where it waited when it was lost, if a finding has it: the frame does not.
    """
    if row.life in _STILL:
        if row.life == Life.FINISHED:
            return [(after, now, "done", "done")]
        seen = row.t_s if row.t_s is not None else after
        return [*_last_phase(row, after, seen, waited), (seen, now, "gone", row.life)]
    out: list[Segment] = []
    if row.waiting_op:
        age, name = row.waiting_age_s or 0.0, "wait"
        text = f"waits in {clean(row.waiting() or '')} for {seconds(age)}"
    else:
        age, name = row.phase_age_s or 0.0, _area(row.phase)
        text = f"{clean(row.phase or '')} for {seconds(age)}" + (f" at {place(row.file, row.line)}" if row.file else "")
    began = max(after, now - age)
    if began > after:
        out.append((after, began, "unknown", ""))
    out.append((began, now, name, text))
    return out


def _area(phase: str | None) -> str:
    return "wait" if phase == "collective" else phase if phase in _ORDER else "other"


def _last_phase(row: RankRow, after: float, seen: float, waited: Where | None) -> list[Segment]:
    """Return the phase in which a rank was until it went."""
    if row.phase_age_s is None or seen <= after:
        return []
    where = f"at {place(row.file, row.line)}" if row.file else ""
    name, phase = _area(row.phase), clean(row.phase or "")
    if waited is not None:
        name, phase, where = "wait", "waited in a collective", f"at {place(waited.file, waited.line)}"
    text = f"{'' if phase == 'other' and where else phase} {where} until {clock(seen)}".strip()
    began = max(after, seen - row.phase_age_s)
    return [
        (after, began, "unknown", ""),
        (began, seen, name, text),
    ]


def lane(segments: list[Segment], begin: float, end: float, width: int, colour: bool) -> list[Part]:
    """Return segments between two times in exactly `width` cells, each half cell in the colour that fills most of it."""
    halves = 2 if colour else 1
    n = width * halves
    scale = n / (end - begin) if end > begin else 0.0
    owner: list[str] = [""] * n
    filled = [0.0] * n
    texts: list[tuple[int, int, str, str]] = []
    for a, b, name, text in segments:
        x0, x1 = max(0.0, (a - begin) * scale), min(float(n), (b - begin) * scale)
        if x1 <= x0:
            continue
        for i in range(int(x0), min(n, int(x1) + 1)):
            share = min(i + 1.0, x1) - max(float(i), x0)
            if share > filled[i]:
                owner[i], filled[i] = name, share
        if text:
            texts.append((-(-int(x0) // halves) + 1, int(x1) // halves, text, name))
    out: list[Part] = []
    at = 0
    for x0, x1, text, name in texts:
        if x1 - x0 < 8 or x0 < at:
            continue
        out += _cells(owner, at, x0, halves)
        shown = clip(text, x1 - x0 - 1)
        style = f"in-{name}" if colour and name in LETTERS else {"done": "muted", "gone": "error"}.get(name, "")
        if not colour and name in LETTERS:
            shown = f"{LETTERS[name]} {clip(text, x1 - x0 - 3)}"
        out.append((f" {shown}"[: x1 - x0].ljust(min(x1 - x0, cells(shown) + 2)), style, ""))
        at = x0 + cells(out[-1][0])
    return [*out, *_cells(owner, at, width, halves)]


_NO_AREA = {"unknown": ("·", "muted"), "": (" ", ""), "gone": (" ", ""), "done": (" ", "")}


def _cells(owner: list[str], begin: int, end: int, halves: int) -> Line:
    """Return some cells of a lane, each half in the colour of what owns it."""
    out: list[Part] = []
    for x in range(begin, end):
        left, right = owner[x * halves], owner[x * halves + halves - 1]
        if halves == 1:
            glyph = LETTERS.get(left, {"gone": "×", "unknown": "·"}.get(left, " "))
            text, style = glyph, "muted" if left in ("wait", "unknown") else ""
        elif left == right:
            text, style = _NO_AREA.get(left, (" ", f"on-{left}"))
        elif left in LETTERS:
            text, style = "▌", f"area-{left}" + (f" on-{right}" if right in LETTERS else "")
        else:
            text, style = ("▐", f"area-{right}") if right in LETTERS else (" ", "")
        out.append((text, style, ""))
    return merged(out)


class TimelinePage(RankedPage[TimelineData]):
    name = title = "timeline"
    question = "who stopped first, and who waits for it?"
    empty = TimelineData
    read = staticmethod(timeline_data.read)

    def pan(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Move by twentieths of the span; at the end the timeline follows the job again."""
        data = snap.panel
        if snap.frame is not None and isinstance(data, TimelineData):
            until = max(data.first_s, data.end_s + by * (data.end_s - data.begin_s) / 20)
            ui.until_s = None if until >= snap.frame.t_s else until

    def zoom(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Show less (`by` > 0) or more seconds."""
        data = snap.panel
        at = _span(snap, ui)
        if ui.span_s is None and isinstance(data, TimelineData):
            at = next((x for x in SPANS if x >= data.end_s - data.begin_s), SPANS[-1])
        ui.span_s = SPANS[max(0, min(len(SPANS) - 1, SPANS.index(at) - by))]

    def click(self, snap: Snapshot, ui: Ui, rank: int, x: int) -> None:
        """Put the cursor on the lane that was clicked."""
        ui.cursor["timeline"] = rank

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        items = self.order.ranks(snap, ui)
        room = _room(height, 3)
        top, _ = ui.window("timeline", items, room)
        stopped = ui.span_s is None and ui.until_s is None and job_state(snap).word in _OVER
        return Request(
            "timeline", ui.paused_at_s, None, tuple(items[top : top + room]), extra=stopped, span=_span(snap, ui),
            until=ui.until_s,
        )  # fmt: skip

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data, job = self.data(snap), job_state(snap)
        span = data.end_s - data.begin_s
        items = self.order.ranks(snap, ui)
        least = 6 if height >= 28 else 3  # with few lanes the findings get what is left, up to a third of the screen
        spare = [height - 5 - tall * len(items) for tall in (2, 1)]  # what lanes of two lines, or one, leave
        left = next((n for n in spare if n >= least), least)
        sheet = Sheet(width, height, footer_panel(snap, ui, job, width, max(least, min(height // 3, left))))
        sheet.add(self.head(snap, ui, width, f"{seconds(span)} up to {clock(data.end_s)}" if span > 0 else ""))
        legend = bars.legend(width - 40, colour=ui.drawn)
        sheet.add((*line((" space holds   ←→ pan   + - zoom   ", "muted")), *legend))
        if snap.frame is None or not items or span <= 0:
            sheet.add(BLANK)
            sheet.note("   No rank to show yet.")
            return sheet.done()
        plot, room = max(8, width - LABEL - 1), _room(height, len(sheet.panel))
        top, index = ui.window("timeline", items, room)
        tall = max(1, min(TALLEST, room // len(items)))
        sheet.add(_collectives(data, plot))
        for nth, rank in enumerate(items[top : top + room], top):
            if nth == index:
                sheet.cursor = len(sheet.lines)
            sheet.add(*_lane(snap, ui, data, rank, (plot, tall), nth == index))
        sheet.add(_axis(data, plot))
        if top + room < len(items) or top:
            sheet.note(f"   ranks {top + 1:,}–{min(len(items), top + room):,} of {len(items):,}")
        sheet.rows = room
        sheet.lines = sheet.lines[: height - len(sheet.panel)]
        sheet.panel = footer_panel(snap, ui, job, width, max(len(sheet.panel), height - len(sheet.lines) - 1))
        return sheet.done()


def _room(height: int, panel: int) -> int:
    return max(1, height - 5 - panel)


def _span(snap: Snapshot, ui: Ui) -> float:
    """Return the seconds to show: eight steps, or all since the job stopped plus four steps before."""
    if ui.span_s is not None:
        return ui.span_s
    step_s = (snap.summary.step_ms or 250.0) / 1e3
    wanted = 8 * step_s
    if job_state(snap).stuck or snap.summary.waiting_age_s:
        wanted = max(wanted, 4 * step_s + 1.25 * (snap.summary.waiting_age_s or 0.0))
    return next((s for s in SPANS if s >= wanted), SPANS[-1])


def _lane(snap: Snapshot, ui: Ui, data: TimelineData, rank: int, plot: tuple[int, int], here: bool) -> list[Line]:
    """Return the lane of a rank in `plot` cells and lines; if it has more than two lines, the last one is empty."""
    assert snap.frame is not None
    i = snap.summary.layout.row_of[rank]
    row, mark = snap.frame.table.row(i), snap.summary.marks[i]
    segments: list[Segment] = []
    after = data.begin_s
    for step in data.steps.get(rank, ()):
        segments += of_step(step)
        after = max(after, step.t_end_s)
    if data.end_s >= snap.frame.t_s - 1e-6 or not data.steps.get(rank):
        known = (w for f in snap.open_findings for w in (*f.where, *f.waiting) if w.rank == rank and w.file)
        waited = next((w for w in known if w.state == "waiting"), None)
        segments += now_of(row, after, snap.frame.t_s, waited)
    cursor = " cursor" if here and ui.interactive else ""
    style = ("bold" if mark.level > 1 else "") + cursor
    lead: list[Part] = [(f" {mark.glyph} ", f"{mark.style}{cursor}".strip(), ""), (f"{rank:>5}  ", style.strip(), "")]
    blank: list[Part] = [(" " * sum(cells(t) for t, _, _ in lead), style.strip(), "")]
    width, tall = plot
    named = lane(segments, data.begin_s, data.end_s, width, ui.drawn)
    wordless = lane([(a, b, name, "") for a, b, name, _ in segments], data.begin_s, data.end_s, width, ui.drawn)
    coloured = tall - 1 if tall > 2 else tall
    middle = (coloured - 1) // 2
    made = [[*(lead if i == middle else blank), *(named if i == middle else wordless)] for i in range(coloured)]
    lines: list[Line] = [tuple((t, s, f"cell:{rank}") for t, s, _ in parts if t) for parts in made]
    return [*lines, *[BLANK] * (tall - len(lines))]


def _collectives(data: TimelineData, plot: int) -> Line:
    """Collectives that all ranks completed: from the first arrival to the last thin, the transfer thick."""
    scale = plot / (data.end_s - data.begin_s)
    out = [" "] * plot
    for first, last, end in data.collectives:
        a, b, c = (int((t - data.begin_s) * scale) for t in (first, last, end))
        for x in range(max(0, a), min(plot, b)):
            if out[x] == " ":
                out[x] = "─"
        for x in range(max(0, b), min(plot, max(b + 1, c))):
            out[x] = "━"
    return explained(line((fit(" comm", LABEL), "muted"), ("".join(out), "accent")), "comm", COMM)


def _axis(data: TimelineData, plot: int) -> Line:
    span = data.end_s - data.begin_s
    text = [" "] * plot
    for x in range(0, plot - 18, 20):
        label = f"-{seconds(span * (plot - x) / plot)}"
        text[x : x + len(label)] = label
    end = clock(data.end_s)
    text[plot - len(end) :] = end
    return line((" " * LABEL + "".join(text)[:plot], "head"))
