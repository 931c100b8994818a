"""Probes: how fast is the machine, and is the job as fast?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.store.rows import ProbeResult
from distdiag.terms.operations import family
from distdiag.tui.data import comm_data
from distdiag.tui.data.comm_data import CommData, as_number, decoded, rows_of
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.draw.lines import BLANK, Line, Screenful, line, rule
from distdiag.tui.draw.text import MISSING, clean, clock, decimal, fit, size
from distdiag.tui.screens.page import Page
from distdiag.tui.ui import Ui

OWN_WIDTH = 100  # narrower screens lack the column of the job's own bandwidth
_MARKS = {"pass": ("·", "muted"), "fail": ("█", "error"), "inconclusive": ("▲", "warning")}  # glyph and style


@dataclass(frozen=True)
class ProbesData:
    """Probe results of this run, newest first, decoded where they could be."""

    results: tuple[tuple[ProbeResult, dict[str, Any]], ...] = ()
    comm: CommData | None = None


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> ProbesData:
    known = (p for p in reversed(run.probes()) if request.at_s is None or p.t_s <= request.at_s)
    return ProbesData(tuple((p, decoded(p)) for p in known), comm_data.read(run, request, frame, cache))


class ProbesPage(Page[ProbesData]):
    name = title = "probes"
    question = "how fast is the machine? is the job as fast?"
    empty = ProbesData
    read = staticmethod(read)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return range(len(self.data(snap).results))

    def rank_of(self, snap: Snapshot, item: Hashable) -> None:
        """No line of this screen is about one rank."""

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = self.data(snap)
        sheet = self.sheet(snap, ui, width, height)
        if not data.results:
            sheet.add(BLANK, line("   No probe was recorded into this run."))
            sheet.note("   distdiag probe allreduce       while the job runs, in another terminal")
            return sheet.done()
        sheet.note("    when      probe            verdict       what it says", "head")
        room = max(2, min(len(data.results), (height - len(sheet.panel)) // 3))
        _, index = sheet.list(
            ui, "probes", range(len(data.results)), room, lambda some: (_result(*data.results[i]) for i in some), "  "
        )
        sheet.add(BLANK)
        sheet.add(*_details(*data.results[index or 0], data.comm, width, sheet.left))
        return sheet.done()


def _result(p: ProbeResult, body: dict[str, Any]) -> Line:
    verdict = clean(p.verdict or "?")
    glyph, style = _MARKS.get(verdict, ("–", ""))
    reasons = body.get("reasons")
    text = "; ".join(clean(str(r)) for r in reasons) if isinstance(reasons, list) and reasons else ""
    if not text:
        best = max((b for r in rows_of(body) if (b := as_number(r.get("busbw_gbps"))) is not None), default=None)
        text = f"busbw up to {decimal(best, 2)} GB/s" if best is not None else ""
    return line(
        (f" {glyph} ", style),
        f" {clock(p.t_s)}  {fit(clean(p.name), 15)}  ",
        (fit(verdict, 12), style),
        f"  {text}",
    )


def _details(p: ProbeResult, body: dict[str, Any], comm: CommData | None, width: int, room: int) -> list[Line]:
    """Return the sizes of one probe with the measured rates, and those of the job's own collectives at the nearest size."""
    rows = rows_of(body)
    facts = [f"{k} {clean(str(body[k]))}" for k in ("backend", "world_size", "device") if body.get(k) is not None]
    out = [rule(width, f"{clean(p.name)}   {'   '.join(facts)} ")]
    if not rows:
        return [*out, line(("   no table in this result", "muted"))]
    own = "   the job's own busbw" if width >= OWN_WIDTH else ""
    head = "        size     p50 us     p95 us   algbw GB/s   busbw GB/s    skew us   late"
    out.append(line((head + own, "head")))
    for r in rows[: max(1, room - 3)]:
        time_us = r["time_us"] if isinstance(r.get("time_us"), dict) else {}
        nbytes = as_number(r.get("bytes"))
        late = r.get("late_rank")
        text = (
            f"{size(nbytes):>12} {decimal(as_number(time_us.get('p50'))):>10} {decimal(as_number(time_us.get('p95'))):>10}"
            f" {decimal(as_number(r.get('algbw_gbps')), 2):>12} {decimal(as_number(r.get('busbw_gbps')), 2):>12}"
            f" {decimal(as_number(r.get('skew_us'))):>10} {clean(str(late if late is not None else MISSING)):>6}"
        )
        reached = f"   {_job_reaches(p.name, nbytes, comm)}" if own else ""
        out.append(line(text, (reached, "muted"), ("   WRONG VALUES" if r.get("correct") is False else "", "error")))
    if len(rows) > max(1, room - 3):
        out.append(line((f"   {len(rows) - max(1, room - 3)} more sizes: distdiag probe --json", "muted")))
    model = body.get("fit")
    if isinstance(model, dict) and room > 6:
        latency, bandwidth = (
            decimal(as_number(model.get("latency_us"))),
            decimal(as_number(model.get("bandwidth_gbps")), 2),
        )
        half = size(as_number(model.get("half_bandwidth_bytes")))
        out.append(
            line((f" fit: latency {latency} us, bandwidth {bandwidth} GB/s, half that bandwidth at {half}", "muted"))
        )
    return out


def _job_reaches(probe: str, nbytes: float | None, comm: CommData | None) -> str:
    if comm is None or not nbytes:
        return MISSING
    near = [
        (abs(whole - nbytes), whole, o.busbw_gbps) for o in comm.ops
        if family(o.op) is family(probe) is not None and (whole := o.message_bytes) and o.busbw_gbps
        and 0.5 <= whole / nbytes <= 2
    ]  # fmt: skip
    if not near:
        return MISSING
    _, whole, busbw_gbps = min(near)
    return f"{decimal(busbw_gbps, 2)} at {size(whole)}"
