"""Findings: what happened while I was away?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from distdiag.diagnosis.model.findings import Finding, rank_list
from distdiag.store.reader import Event, Frame, Run
from distdiag.terms.units import size_text
from distdiag.tui.header import title_line
from distdiag.tui.lines import BLANK, Line, Screenful, fitted, line, marked, rule
from distdiag.tui.panels import finding_lines, where_text
from distdiag.tui.snapshot import Request, Snapshot
from distdiag.tui.text import clean, clock, wrap
from distdiag.tui.ui import Ui

_EVENTS = 5


@dataclass(frozen=True)
class FindingsData:
    """The monitor's own events."""

    events: tuple[Event, ...] = ()


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> FindingsData:
    return FindingsData(tuple(e for e in run.events(50) if request.at_s is None or (e.t_s or 0.0) <= request.at_s))


class FindingsPage:
    name = "findings"
    title = "findings"
    question = "what happened while I was away?"

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        return Request("findings", ui.paused_at_s)

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return [f.key for f in snap.findings]

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        n_open = len(snap.open_findings)
        cleared = len(snap.findings) - n_open
        lines = [title_line(snap, ui, width, self.title, self.question, f"{n_open} open, {cleared} cleared"), BLANK]
        tail = _event_lines(snap, width, height)
        room = height - len(lines) - len(tail)
        if not snap.findings:
            text = "   No findings so far." if snap.problem is None else "   The run cannot be read."
            hint = "   A healthy job has no finding of severity warning or above. Deadlocks show here within seconds."
            body, cursor = [line((text, "")), line((hint, "muted"))], None
        else:
            body, cursor = self._blocks(snap, ui, width, room)
        at = None if cursor is None else len(lines) + cursor
        lines += body[:room]
        lines = [fitted(x, width) for x in lines]
        lines += [BLANK] * (height - len(lines) - len(tail))
        return Screenful([*lines, *tail][:height], 1, at)

    def _blocks(self, snap: Snapshot, ui: Ui, width: int, room: int) -> tuple[list[Line], int | None]:
        """All findings: the one under the cursor in full, four lines of each other; scrolled so that it is visible."""
        items = self.items(snap, ui)
        chosen = ui.index("findings", items) if ui.interactive else None
        blocks: list[list[Line]] = []
        for i, f in enumerate(snap.findings):
            block = [*finding_lines(f, width), *(evidence_lines(f, width, i == chosen or not ui.interactive))]
            if i == chosen:
                block[0] = marked(block[0], width)
            blocks.append([*block, BLANK])
        first = 0
        if chosen is not None:
            while first < chosen and sum(len(b) for b in blocks[first : chosen + 1]) > room - 1:
                first += 1
        out: list[Line] = []
        cursor, last, cut = None, len(blocks), False
        for i in range(first, len(blocks)):
            if i == chosen:
                cursor = len(out)
            if len(out) + len(blocks[i]) > room and i > first:
                last = i
                if room - 1 - len(out) >= 3:
                    out += blocks[i][: room - 1 - len(out)]
                    last, cut = i + 1, True
                break
            out += blocks[i]
        if first or cut or last < len(blocks):
            out = out[: room - 1]
            out += [BLANK] * (room - 1 - len(out))
            out.append(
                line(
                    (
                        f"   findings {first + 1}–{last} of {len(blocks)}{': the last one is cut, ↓ shows it' if cut else ''}",
                        "muted",
                    )
                )
            )
        return out, cursor


def evidence_lines(f: Finding, width: int, full: bool) -> list[Line]:
    """When it was seen, on which collective, where every rank was, and the evidence files."""
    parts = []
    if f.first_seen_s is not None:
        parts.append(f"first seen {clock(f.first_seen_s)}")
    if f.detected_s is not None:
        parts.append(f"raised {clock(f.detected_s)}")
    if f.cleared_s is not None:
        parts.append(f"cleared {clock(f.cleared_s)}")
    if f.step is not None:
        parts.append(f"step {f.step:,}")
    parts += [f"cause {clean(f.cause)}"] if f.cause else []
    parts += [f.certainty] if f.certainty else []
    rows = [("when", ", ".join(parts))]
    if full:
        if f.collective is not None:
            c = f.collective
            number = f" #{c.seq}" if c.seq is not None else ""
            rows.append(("in", f"{clean(c.op)}{number} of group {clean(c.group)}, {size_text(c.bytes)}"))
        if f.culprits:
            rows.append(("culprit", rank_list(f.culprits)))
        if f.victims:
            rows.append(("victims" if f.culprits else "members", rank_list(f.victims)))
        rows += [("at" if i == 0 else "", where_text(w)) for i, w in enumerate(f.where[2:8])]
        rows += [("waits" if i == 0 else "", where_text(w)) for i, w in enumerate(f.waiting[:4])]
        if len(f.waiting) > 4:
            rows.append(("", f"and {len(f.waiting) - 4} more ranks"))
        if len(f.names) > 3:
            rows.append(
                (
                    "names",
                    ", ".join(map(clean, f.names[:24]))
                    + (f" and {len(f.names) - 24} more" if len(f.names) > 24 else ""),
                )
            )
        rows += [("evidence" if i == 0 else "", clean(e)) for i, e in enumerate(f.evidence[:4])]
    out = []
    for word, text in rows:
        for i, piece in enumerate(wrap(text, width - 13)):
            out.append(line((f"   {word if i == 0 else '':8} ", "muted"), (piece, "muted")))
    return out


def _event_lines(snap: Snapshot, width: int, height: int) -> list[Line]:
    events = snap.panel.events if isinstance(snap.panel, FindingsData) else ()
    shown = events[-(_EVENTS if height >= 30 else 2) :]
    if not shown:
        return []
    out = [rule(width, "monitor events ")]
    for e in shown:
        style = {"error": "error", "warning": "warning"}.get(e.level, "muted")
        out.append(fitted(line((f" {clock(e.t_s)} ", "muted"), (f"{clean(e.source)}: {clean(e.text)}", style)), width))
    return out
