"""Probes: how fast is the machine, and is the job as fast?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.store.rows import ProbeResult
from distdiag.terms.operations import family
from distdiag.tui.data.comm_data import CommData, read_comm
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.draw.lines import BLANK, Line, Screenful, fitted, line, marked, rule
from distdiag.tui.draw.text import clean, clock, decimal, fit, size
from distdiag.tui.header import title_line
from distdiag.tui.panels import brief_panel
from distdiag.tui.ui import Ui

_STYLES = {"pass": "muted", "fail": "error", "inconclusive": "warning"}
OWN_WIDTH = 100  # narrower screens lack the column of the job's own bandwidth
_GLYPHS = {"pass": "·", "fail": "█", "inconclusive": "▲"}


@dataclass(frozen=True)
class ProbesData:
    """Probe results of this run, newest first, decoded where they could be."""

    results: tuple[tuple[ProbeResult, dict[str, Any]], ...] = ()
    comm: CommData | None = None


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> ProbesData:
    out = []
    for p in reversed(run.probes()):
        if request.at_s is not None and p.t_s > request.at_s:
            continue
        try:
            body = msgspec.json.decode(p.json)
        except (msgspec.DecodeError, TypeError):
            body = {}
        out.append((p, body if isinstance(body, dict) else {}))
    return ProbesData(tuple(out), read_comm(run, frame, request.at_s, cache))


class ProbesPage:
    name = "probes"
    title = "probes"
    question = "how fast is the machine? is the job as fast?"

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        return Request("probes", ui.paused_at_s)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return range(len(snap.panel.results)) if isinstance(snap.panel, ProbesData) else []

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, ProbesData) else ProbesData()
        lines = [title_line(snap, ui, width, self.title, self.question)]
        tail = brief_panel(snap, ui, width, height)
        items = self.items(snap, ui)
        cursor = None
        room = 1
        if not items:
            lines += [
                BLANK,
                line(("   No probe was recorded into this run.", "")),
                line(("   distdiag probe allreduce       while the job runs, in another terminal", "muted")),
                line(("   --probe allreduce              between the steps of distdiag.train", "muted")),
            ]
        else:
            room = max(2, min(len(items), (height - len(tail)) // 3))
            top, index = ui.window("probes", items, room)
            lines.append(line(("    when      probe            verdict       what it says", "head")))
            for nth in range(top, min(len(items), top + room)):
                text = _result(*data.results[nth], width)
                if nth == index:
                    cursor = len(lines)
                    text = marked(text, width)
                lines.append(text)
            if len(items) > room:
                lines.append(line((f"   {top + 1}–{min(len(items), top + room)} of {len(items)}", "muted")))
            chosen = data.results[index or 0]
            lines += [BLANK, *_details(*chosen, data.comm, width, height - len(lines) - len(tail) - 1)]
        lines = [fitted(x, width) for x in lines[: height - len(tail)]]
        lines += [BLANK] * (height - len(lines) - len(tail))
        return Screenful([*lines, *tail][:height], room, cursor)


def _rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    rows = body.get("rows")
    return [r for r in rows if isinstance(r, dict)] if isinstance(rows, list) else []


def _number(v: Any) -> float | None:
    return float(v) if isinstance(v, (int, float)) else None


def _result(p: ProbeResult, body: dict[str, Any], width: int) -> Line:
    verdict = clean(p.verdict or "?")
    style = _STYLES.get(verdict, "")
    reasons = body.get("reasons")
    text = "; ".join(clean(str(r)) for r in reasons) if isinstance(reasons, list) and reasons else ""
    if not text:
        best = max((b for r in _rows(body) if (b := _number(r.get("busbw_gbps"))) is not None), default=None)
        text = f"busbw up to {decimal(best, 2)} GB/s" if best is not None else ""
    return line(
        (f" {_GLYPHS.get(verdict, '–')} ", style),
        f" {clock(p.t_s)}  {fit(clean(p.name), 15)}  ",
        (fit(verdict, 12), style),
        f"  {text}",
    )


def _details(p: ProbeResult, body: dict[str, Any], comm: CommData | None, width: int, room: int) -> list[Line]:
    """Return the sizes of one probe with the measured rates, and those of the job's own collectives at the nearest size."""
    rows = _rows(body)
    facts = [f"{k} {clean(str(body[k]))}" for k in ("backend", "world_size", "device") if body.get(k) is not None]
    out = [rule(width, f"{clean(p.name)}   {'   '.join(facts)} ")]
    if not rows:
        return [*out, line(("   no table in this result", "muted"))]
    out.append(
        line(
            (
                "        size     p50 us     p95 us   algbw GB/s   busbw GB/s    skew us   late"
                + ("   the job's own busbw" if width >= OWN_WIDTH else ""),
                "head",
            )
        )
    )
    for r in rows[: max(1, room - 3)]:
        time_us = r.get("time_us") if isinstance(r.get("time_us"), dict) else {}
        assert isinstance(time_us, dict)
        nbytes = _number(r.get("bytes"))
        wrong = r.get("correct") is False
        text = (
            f"{size(nbytes):>12} {decimal(_number(time_us.get('p50'))):>10} {decimal(_number(time_us.get('p95'))):>10}"
            f" {decimal(_number(r.get('algbw_gbps')), 2):>12} {decimal(_number(r.get('busbw_gbps')), 2):>12}"
            f" {decimal(_number(r.get('skew_us'))):>10} {clean(str(r.get('late_rank') if r.get('late_rank') is not None else '–')):>6}"
        )
        out.append(
            line(
                text,
                (f"   {_job_reaches(p.name, nbytes, comm)}" if width >= OWN_WIDTH else "", "muted"),
                ("   WRONG VALUES" if wrong else "", "error"),
            )
        )
    if len(rows) > max(1, room - 3):
        out.append(line((f"   {len(rows) - max(1, room - 3)} more sizes: distdiag probe --json", "muted")))
    model = body.get("fit")
    if isinstance(model, dict) and room > 6:
        latency, bandwidth = decimal(_number(model.get("latency_us"))), decimal(_number(model.get("bandwidth_gbps")), 2)
        half = size(_number(model.get("half_bandwidth_bytes")))
        out.append(line((f" fit: latency {latency} us, bandwidth {bandwidth} GB/s, half of it at {half}", "muted")))
    return out


def _job_reaches(probe: str, nbytes: float | None, comm: CommData | None) -> str:
    if comm is None or not nbytes:
        return "–"
    near = [
        o
        for o in comm.ops
        if (family(o.op) is family(probe) is not None and (whole := o.message_bytes) and o.busbw_gbps)
        and 0.5 <= whole / nbytes <= 2
    ]
    if not near:
        return "–"
    o = min(near, key=lambda o: abs((o.message_bytes or 0) - nbytes))
    return f"{decimal(o.busbw_gbps, 2)} at {size(o.message_bytes)}"
