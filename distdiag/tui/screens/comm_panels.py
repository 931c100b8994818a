"""The Comm screen's pictures: who arrives when, groups by collectives, bandwidth next to what a probe reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distdiag.store.frames import Frame
from distdiag.tui.data.comm_data import CommData, InFlight, OpStats
from distdiag.tui.draw import bars
from distdiag.tui.draw.charts import Chart, Curve, grid
from distdiag.tui.draw.lines import BLANK, Line, Part, explained, fitted, line
from distdiag.tui.draw.text import SPARKS, cells, clean, clip, counted, decimal, fit, milliseconds, seconds, size

LEAST_SPREAD_MS = 0.5  # between first and last arrival; below it the picture would show noise
STALE_S = 5.0  # from this age on a collective in flight is drawn as an error
ARRIVALS = "when the ranks arrive, after the first of them (of each rank the median); a higher bar is more ranks"
_NAME, _CELL = 20, 18
Marks = tuple[tuple[float, str], ...]  # moments and their style


def arrivals(frame: Frame | None, data: CommData, at: int, width: int, room: int) -> list[Line]:
    """Draw who arrives when, on axes from the first rank to the last: at a step's first collective, and at each operation.

    Args:
        at: Index of the operation at the cursor, which is drawn first.
        room: Lines at most.
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
    return clip(f"{clean(o.op)} {size(o.bytes) if o.bytes is not None else ''}".rstrip(), _NAME + 4)


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
        Chart("transfer", "ms", (Curve("", times, durations, "accent"),), _ms, marks=marks,
              help="on the rank that arrived last: waiting for late ranks is not in it"),
        Chart("skew", "ms", (Curve("", times, skews, "area-hot", not ascii_only),), _ms, marks=marks,
              help="last arrival - first arrival: the first rank waits as long"),
    ]  # fmt: skip
    if o.busbw_gbps and o.p50_us:
        factor = o.busbw_gbps * o.p50_us / 1e3
        rates = [factor / d if d else None for d in durations]
        about = "size / time x the operation's factor, comparable to the link"
        found.append(Chart("busbw", "GB/s", (Curve("", times, rates, "accent"),), _ms, marks=marks, help=about))
    found = [c for c in found if any(v is not None for v in c.curves[0].values)]
    if not found or len(times) < 2:
        return []
    end = min(now, times[-1] + 0.25 * (times[-1] - times[0]))  # however long the job has been stuck since then
    made = grid(found, times[0], end, width - 1, height - 1, ascii_only)
    name = f" {clean(o.op)} {size(o.bytes) if o.bytes is not None else ''}".rstrip()
    return [line((name, "bold"), (f"   group {clean(o.group)}", "muted")), *made] if made else []


def _ms(v: float | None) -> str:
    return decimal(v, 2 if v is not None and v < 9.995 else 1 if v is not None and v < 999.5 else 0)


def matrix(data: CommData, width: int, room: int) -> list[Line]:
    """Draw groups by collectives: how many per step, or for how long one is in flight; empty for a single group."""
    flying = {(f.group, f.op): f for f in data.in_flight}
    per_step: dict[tuple[str, str], float | None] = {}
    for o in data.ops:
        before = per_step.get((o.group, o.op))
        per_step[o.group, o.op] = before if o.per_step is None else (before or 0.0) + o.per_step
    groups = list(dict.fromkeys([g for g, _ in flying] + [o.group for o in data.ops]))
    ops = list(dict.fromkeys([op for _, op in flying] + [o.op for o in data.ops]))
    if len(groups) < 2 or room < 4:
        return []
    ops = ops[: max(1, (width - _NAME - 2) // (_CELL + 1))]
    out = [line((" " + fit("per step", _NAME) + "".join(" " + fit(clean(op), _CELL, ">") for op in ops), "head"))]
    shown = groups[: room - 2]
    for group in shown:
        parts: list[Part] = [(" " + fit(clip(clean(group), _NAME), _NAME), "", "")]
        parts += [_cell(flying.get((group, op)), per_step.get((group, op))) for op in ops]
        out.append(tuple(parts))
    if len(groups) > len(shown):
        out.append(line((f"   {counted(len(groups) - len(shown), 'more group')}", "muted")))
    return [*out, BLANK]


def _cell(flight: InFlight | None, per_step: float | None) -> Part:
    if flight is not None:
        text, style = f"in it {seconds(flight.age_s)}", "error" if (flight.age_s or 0.0) > STALE_S else "accent"
    elif per_step is None:
        text, style = "·", "muted"
    else:
        text, style = per_step_text(per_step), ""
    return (" " + fit(text, _CELL, ">"), style, "")


def per_step_text(n: float | None) -> str:
    return decimal(n, 0 if (n or 0) >= 1 else 2)


def ceiling(reached_gbps: float, probed_gbps: float, width: int, *, colour: bool) -> Sequence[Part]:
    """Draw bandwidth as a bar of `width` cells whose end is what the probe reached."""
    share = reached_gbps / probed_gbps if probed_gbps > 0 else None
    return [("  ", "", ""), *bars.gauge(share, width, colour=colour, style="fill" if (share or 0) >= 0.7 else "hot")]
