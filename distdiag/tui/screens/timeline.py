"""Timeline: the last seconds of all ranks as lanes. Who stopped first, and who waits for it?

A step is recorded as how long each phase took, not when: phases are drawn in the order of a training loop, the waiting
after backward, where DDP waits. What a rank does now is drawn from the newest frame.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from distdiag.diagnosis.model.findings import Where
from distdiag.diagnosis.model.snapshot import Life
from distdiag.store.frames import Frame, RankRow
from distdiag.store.reader import Run
from distdiag.tui.data.order import Cached
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.draw import bars
from distdiag.tui.draw.lines import BLANK, Line, Part, Screenful, explained, fitted, line
from distdiag.tui.draw.palette import LETTERS
from distdiag.tui.draw.text import cells, clean, clip, clock, fit, place, seconds
from distdiag.tui.header import title_line
from distdiag.tui.panels import footer_panel
from distdiag.tui.ui import Ui

LABEL = 10
TALLEST = 6  # lines of one lane: five of colour and an empty one
COMM = "collectives that all ranks completed: thin from the first arrival to the last, thick the transfer"
ROWS = 4000  # steps of ranks in one picture: it shows fewer seconds where there are more
COLLECTIVES = 400
# seconds that the screen shows; + and - go through them
SPANS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)  # fmt: skip
_COLUMNS = (
    "t_end_s",
    "step_ms",
    "data_ms",
    "forward_ms",
    "backward_ms",
    "optimizer_ms",
    "other_ms",
    "h2d_ms",
    "wait_ms",
)
_PHASES = {"data": "data", "forward": "forward", "backward": "backward", "optimizer": "optimizer", "collective": "wait"}
_OVER = ("ENDED", "FAILED", "LOST", "MONITOR GONE")
_GONE = frozenset({Life.KILLED, Life.CRASHED, Life.SILENT, Life.FINISHED, Life.STOPPED, Life.DETACHED})

Segment = tuple[float, float, str, str]  # begin and end in seconds of the run, name of the area, text inside


@dataclass(frozen=True)
class TimelineData:
    """Steps and collectives of a span of time."""

    begin_s: float = 0.0
    end_s: float = 0.0
    steps: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)  # by rank, rising: values of `_COLUMNS`
    collectives: tuple[tuple[float, float, float], ...] = ()  # first arrival, last arrival, end
    first_s: float = 0.0  # end of the run's first step


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> TimelineData:
    """Steps that overlap the span; those read before are kept."""
    end = min(frame.t_s, request.until) if request.until is not None else frame.t_s
    begin = end - request.span
    if request.extra and (ended := run.query("SELECT max(t_end_s) FROM step WHERE t_end_s <= ?", (end,))[0][0]):
        # the last steps stay on the screen after the job has stopped, in a fifth of it at least
        begin = min(begin, ended - max(request.span, (end - ended) / 4)) if ended < begin else begin
    steps: dict[int, list[tuple[Any, ...]]] = {r: [] for r in request.ranks}
    before, until = run.step_range(begin), run.step_range(frame.t_s)
    first_s = 0.0
    if until is not None:
        last = until[1]
        first = max(until[0] if before is None else before[1], last - ROWS // max(1, len(request.ranks)))
        for (rank, step), row in sorted(_cached(run, request.ranks, first, last, cache).items()):
            if first <= step <= last and row[0] is not None and row[0] > begin:
                steps[rank].append(row)
        first_s = cache.setdefault("timeline_first", run.query("SELECT min(t_end_s) FROM step WHERE step = ?", (until[0],))[0][0]) or 0.0  # fmt: skip
    found = run.query(
        "SELECT t_s, skew_us, duration_us FROM collective WHERE t_s BETWEEN ? AND ? AND skew_us IS NOT NULL ORDER BY t_s DESC LIMIT ?",
        (begin, end, COLLECTIVES),
    )
    marks = tuple((t, t + (skew or 0) / 1e6, t + ((skew or 0) + (took or 0)) / 1e6) for t, skew, took in found)
    return TimelineData(begin, end, steps, marks, first_s)


def _cached(
    run: Run, ranks: tuple[int, ...], first: int, last: int, cache: dict[Any, Any]
) -> dict[tuple[int, int], tuple[Any, ...]]:
    key = tuple(sorted(ranks))
    kept: dict[tuple[int, int], tuple[Any, ...]] = cache.get("timeline", {}) if cache.get("timeline_key") == key else {}
    span = cache.get("timeline_span", (0, -1)) if kept else (0, -1)
    # the two newest steps are read again: ranks that had not written yet may be there now
    wanted = (last - 1, last) if span[0] <= first and span[1] >= last - 1 else (first, last)
    if span[0] <= first <= span[1] < last:
        wanted = (span[1] - 1, last)
    marks = ",".join(f"?{i + 3}" for i in range(len(key)))
    rows = run.query(
        "WITH RECURSIVE wanted(n) AS (VALUES (?1) UNION ALL SELECT n + 1 FROM wanted WHERE n < ?2)"
        f" SELECT step.rank, step.step, {', '.join(_COLUMNS)} FROM wanted CROSS JOIN step"
        f" ON step.step = wanted.n AND step.rank IN ({marks})",
        (*wanted, *key),
    )
    kept = {k: v for k, v in kept.items() if first <= k[1] <= last}
    kept.update({(r[0], r[1]): r[2:] for r in rows})
    cache["timeline_key"], cache["timeline"], cache["timeline_span"] = key, kept, (first, last)
    return kept


def of_step(row: tuple[Any, ...]) -> list[Segment]:
    """Return the phases of one step, in the order of a training loop."""
    t, step, data, forward, backward, optimizer, other, h2d, wait = (v or 0.0 for v in row)
    parts = {"data": data, "forward": forward, "backward": backward, "optimizer": optimizer, "other": other + h2d}
    apart = max(0.0, step - sum(parts.values()))
    parts["backward"] = max(0.0, parts["backward"] - max(0.0, wait - apart))
    at = t - step / 1e3
    out: list[Segment] = []
    for name, ms in (
        ("data", data), ("forward", forward), ("backward", parts["backward"]), ("wait", wait), ("optimizer", optimizer),
        ("other", parts["other"]),
    ):  # fmt: skip
        if ms > 0:
            out.append((at, min(t, at + ms / 1e3), name, ""))
            at += ms / 1e3
    return out


def now_of(row: RankRow, after: float, now: float, waited: Where | None = None) -> list[Segment]:
    """Return what a rank has done since its last step.

    Args:
        row: The rank in the newest frame.
        after: When its last step ended, seconds of the run.
        now: Time of the frame.
        waited: Where the rank waited when it was lost, if a finding has it: the frame does not.
    """
    if row.life in _GONE or row.life == Life.MISSING:
        if row.life == Life.FINISHED:
            return [(after, now, "done", "done")]
        seen = row.t_s if row.t_s is not None else after
        return [*_last_phase(row, after, seen, waited), (seen, now, "gone", row.life)]
    out: list[Segment] = []
    if row.waiting_op:
        age, name = row.waiting_age_s or 0.0, "wait"
        number = f" #{row.waiting_seq}" if row.waiting_seq is not None else ""
        group = f" ({clean(row.waiting_group)})" if row.waiting_group else ""
        text = f"waits in {clean(row.waiting_op)}{number}{group} for {seconds(age)}"
    else:
        age, name = row.phase_age_s or 0.0, _PHASES.get(row.phase or "", "other")
        text = f"{clean(row.phase or '')} for {seconds(age)}" + (f" at {place(row.file, row.line)}" if row.file else "")
    began = max(after, now - age)
    if began > after:
        out.append((after, began, "unknown", ""))
    out.append((began, now, name, text))
    return out


def _last_phase(row: RankRow, after: float, seen: float, waited: Where | None) -> list[Segment]:
    """Return the phase in which a rank was until it went."""
    if row.phase_age_s is None or seen <= after:
        return []
    where = f"at {place(row.file, row.line)}" if row.file else ""
    name, phase = _PHASES.get(row.phase or "", "other"), clean(row.phase or "")
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


def _cells(owner: list[str], a: int, b: int, halves: int) -> list[Part]:
    out: list[Part] = []
    for x in range(a, b):
        left, right = owner[x * halves], owner[x * halves + halves - 1]
        if halves == 1:
            text, style = (
                LETTERS.get(left, "×" if left == "gone" else "·" if left == "unknown" else " "),
                "muted" if left in ("wait", "unknown") else "",
            )
        elif left == right:
            text, style = {"": (" ", ""), "unknown": ("·", "muted"), "gone": (" ", ""), "done": (" ", "")}.get(
                left, (" ", f"on-{left}")
            )
        elif left in LETTERS:
            text, style = "▌", f"area-{left}" + (f" on-{right}" if right in LETTERS else "")
        else:
            text, style = ("▐", f"area-{right}") if right in LETTERS else (" ", "")
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style, "")
        else:
            out.append((text, style, ""))
    return out


class TimelinePage:
    name = "timeline"
    title = "timeline"
    question = "who stopped first, and who waits for it?"

    def __init__(self) -> None:
        self.order = Cached(time.monotonic)

    # -- where the person looks -----------------------------------------------------------------------------------

    def pan(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Move by twentieths of the span; at the end the timeline follows the job again."""
        data = snap.panel
        if snap.frame is None or not isinstance(data, TimelineData):
            return
        span = data.end_s - data.begin_s
        until = max(data.first_s, data.end_s + by * span / 20)
        ui.until_s = None if until >= snap.frame.t_s else until

    def zoom(self, snap: Snapshot, ui: Ui, by: int) -> None:
        """Show less (`by` > 0) or more seconds."""
        data = snap.panel
        at = self._span(snap, ui)
        if ui.span_s is None and isinstance(data, TimelineData):
            at = next((x for x in SPANS if x >= data.end_s - data.begin_s), SPANS[-1])
        ui.span_s = SPANS[max(0, min(len(SPANS) - 1, SPANS.index(at) - by))]

    def click(self, snap: Snapshot, ui: Ui, rank: int, x: int) -> None:
        """Put the cursor on the lane that was clicked."""
        ui.cursor["timeline"] = rank

    def _span(self, snap: Snapshot, ui: Ui) -> float:
        """Return the seconds to show: eight steps, or all since the job stopped plus four steps before."""
        if ui.span_s is not None:
            return ui.span_s
        step_s = (snap.summary.step_ms or 250.0) / 1e3
        wanted = 8 * step_s
        if job_state(snap).stuck or snap.summary.waiting_age_s:
            wanted = max(wanted, 4 * step_s + 1.25 * (snap.summary.waiting_age_s or 0.0))
        return next((s for s in SPANS if s >= wanted), SPANS[-1])

    def items(self, snap: Snapshot, ui: Ui) -> list[int]:
        return self.order.ranks(snap, ui)

    def _room(self, height: int, panel: int) -> int:
        return max(1, height - 5 - panel)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        items = self.items(snap, ui)
        room = self._room(height, 3)
        top, _ = ui.window("timeline", items, room)
        shown = tuple(items[top : top + room])
        stopped = ui.span_s is None and ui.until_s is None and job_state(snap).word in _OVER
        return Request(
            "timeline", ui.paused_at_s, None, shown, extra=stopped, span=self._span(snap, ui), until=ui.until_s
        )

    # -- drawing --------------------------------------------------------------------------------------------------

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, TimelineData) else TimelineData()
        span = data.end_s - data.begin_s
        right = f"{seconds(span)} up to {clock(data.end_s)}" if span > 0 else ""
        job = job_state(snap)
        legend = bars.legend(width - 40, colour=ui.drawn)
        lines = [
            title_line(snap, ui, width, self.title, self.question, right),
            (*line((" space holds   ←→ pan   + - zoom   ", "muted")), *legend),
        ]
        items = self.items(snap, ui)
        least = 6 if height >= 28 else 3  # with few lanes the findings get what is left, up to a third of the screen
        spare = [height - 5 - tall * len(items) for tall in (2, 1)]  # what lanes of two lines, or one, leave
        left = next((n for n in spare if n >= least), least)
        panel = footer_panel(snap, ui, job, width, max(least, min(height // 3, left)))
        if snap.frame is None or not items or span <= 0:
            lines += [BLANK, line(("   No rank to show yet.", "muted"))]
            lines += [BLANK] * (height - len(lines) - len(panel))
            return Screenful([*(fitted(x, width) for x in lines), *panel][:height])
        plot = max(8, width - LABEL - 1)
        room = self._room(height, len(panel))
        top, index = ui.window("timeline", items, room)
        tall = max(1, min(TALLEST, room // len(items)))
        rows = {int(r): i for i, r in enumerate(snap.frame.table.numbers("rank"))}
        lines.append(_collectives(data, plot))
        cursor = None
        for nth in range(top, min(len(items), top + room)):
            rank = items[nth]
            if nth == index:
                cursor = len(lines)
            lines += self._lane(snap, ui, data, rank, rows[rank], (plot, tall), nth == index)
        lines.append(_axis(data, plot))
        if top + room < len(items) or top:
            lines.append(line((f"   ranks {top + 1:,}–{min(len(items), top + room):,} of {len(items):,}", "muted")))
        lines = lines[: height - len(panel)]
        panel = footer_panel(snap, ui, job, width, max(len(panel), height - len(lines) - 1))
        lines += [BLANK] * (height - len(lines) - len(panel))
        return Screenful([*(fitted(x, width) for x in lines), *panel][:height], room, cursor)

    def _lane(
        self, snap: Snapshot, ui: Ui, data: TimelineData, rank: int, i: int, plot: tuple[int, int], here: bool
    ) -> list[Line]:
        """Return the lane of a rank in `plot` cells and lines; if it has more than two lines, the last one is empty."""
        assert snap.frame is not None
        row, mark = snap.frame.table.row(i), snap.summary.marks[i]
        segments: list[Segment] = []
        after = data.begin_s
        for step in data.steps.get(rank, ()):
            segments += of_step(step)
            after = max(after, step[0])
        if data.end_s >= snap.frame.t_s - 1e-6 or not data.steps.get(rank):
            known = (w for f in snap.open_findings for w in (*f.where, *f.waiting) if w.rank == rank and w.file)
            waited = next((w for w in known if w.state == "waiting"), None)
            segments += now_of(row, after, snap.frame.t_s, waited)
        style = ("bold" if mark.level > 1 else "") + (" cursor" if here and ui.interactive else "")
        lead: list[Part] = [
            (f" {mark.glyph} ", f"{mark.style}{' cursor' if here and ui.interactive else ''}".strip(), "")
        ]
        lead.append((f"{rank:>5}  ", style.strip(), ""))
        width, tall = plot
        named = lane(segments, data.begin_s, data.end_s, width, ui.drawn)
        wordless = lane([(a, b, name, "") for a, b, name, _ in segments], data.begin_s, data.end_s, width, ui.drawn)
        blank: list[Part] = [(" " * sum(cells(t) for t, _, _ in lead), style.strip(), "")]
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
    """Return seconds before the right edge."""
    span = data.end_s - data.begin_s
    text = [" "] * plot
    for x in range(0, plot - 18, 20):
        label = f"-{seconds(span * (plot - x) / plot)}"
        text[x : x + len(label)] = label
    end = clock(data.end_s)
    text[plot - len(end) :] = end
    return line((" " * LABEL + "".join(text)[:plot], "head"))
