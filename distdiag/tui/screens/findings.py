"""Findings: what happened while I was away?"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from distdiag.diagnosis.model.findings import Finding, Where, rank_list
from distdiag.diagnosis.text.finding import head_and_more, waiting_word
from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.store.rows import Event
from distdiag.terms.units import size_text
from distdiag.tui.data import excerpt
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.draw import severity
from distdiag.tui.draw.charts import side_by_side
from distdiag.tui.draw.lines import BLANK, Line, Screenful, cut, fitted, labelled, line, marked, rule, width_of
from distdiag.tui.draw.text import cells, clean, clip, clock, wrap
from distdiag.tui.panels import finding_lines, names_text, sites_text
from distdiag.tui.screens.page import Page, Sheet
from distdiag.tui.ui import Ui

_EVENTS = 5
BESIDE = 100  # cells of a screen that shows list and story side by side
SOURCE_WIDTH, SHORTEST = 70, 5  # cells and lines of an excerpt
ENTRY_LINES = 4  # of a message in the list, if all findings fit


@dataclass(frozen=True)
class FindingsData:
    """The monitor's own events, and the source of the chosen finding's sites."""

    events: tuple[Event, ...] = ()
    sources: tuple[excerpt.Excerpt, ...] = ()


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> FindingsData:
    events = tuple(e for e in run.events(50) if request.at_s is None or (e.t_s or 0.0) <= request.at_s)
    return FindingsData(events, excerpt.cached(run, request.places, cache))


class FindingsPage(Page[FindingsData]):
    name = title = "findings"
    question = "what happened while I was away?"
    empty = FindingsData
    read = staticmethod(read)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        chosen = snap.findings[ui.index("findings", self.items(snap, ui))] if snap.findings else None
        return Request("findings", ui.paused_at_s, places=() if chosen is None else sites_of(chosen))

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return [f.key for f in snap.findings]

    def rank_of(self, snap: Snapshot, item: Hashable) -> int | None:
        found = next((f for f in snap.findings if f.key == item), None)
        return next(iter((found.culprits or found.victims) if found else ()), None)

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        n_open = len(snap.open_findings)
        sheet = Sheet(width, height, _event_lines(self.data(snap), width, height))
        sheet.add(self.head(snap, ui, width, f"{n_open} open, {len(snap.findings) - n_open} cleared"), BLANK)
        if not snap.findings:
            sheet.add(line("   No findings so far." if snap.problem is None else "   The run cannot be read."))
            sheet.note(
                "   A healthy job has no finding of severity warning or above. Deadlocks show here within seconds."
            )
            return sheet.done()
        if not ui.interactive:
            for f in snap.findings:
                sheet.add(*story_lines(f, (), width - 1), BLANK)
        elif width >= BESIDE:
            self._in_columns(sheet, snap, ui)
        else:
            self._in_rows(sheet, snap, ui)
        return sheet.done()

    def _in_rows(self, sheet: Sheet, snap: Snapshot, ui: Ui) -> None:
        """Write a line of each finding, and below what is known of the chosen one."""
        items = self.items(snap, ui)
        chosen = snap.findings[ui.index("findings", items)]
        if len(items) > 1:
            by_key: dict[Hashable, Finding] = {f.key: f for f in snap.findings}
            room = max(1, min(len(items), sheet.left // 4))

            def entries(keys: Sequence[Hashable]) -> Iterator[Line]:
                return (finding_lines(by_key[key], sheet.width, full=False)[0] for key in keys)

            sheet.list(ui, "findings", items, room, entries, "   findings")
            sheet.add(rule(sheet.width))
        sheet.add(*_story(snap, chosen, sheet.width - 1, sheet.left))

    def _in_columns(self, sheet: Sheet, snap: Snapshot, ui: Ui) -> None:
        """Write the findings at the left, what is known of the chosen one at the right."""
        width, room = sheet.width, sheet.left
        left = max(36, min(56, width // 3))
        items = self.items(snap, ui)
        most = max(1, min(ENTRY_LINES, room // len(items) - 2))  # of a message
        per_page = max(1, room // (most + 2))
        top, chosen = ui.window("findings", items, per_page)
        entries: list[Line] = []
        for i in range(top, min(len(items), top + per_page)):
            entry = list_entry(snap.findings[i], left, most)
            if i == chosen:
                sheet.cursor = len(sheet.lines) + len(entries)
                entry = [marked(x, left) for x in entry]
            entries += [*entry, BLANK]
        story_width = width - left - 3
        story = _story(snap, snap.findings[chosen or 0], story_width, room)
        for a, b in islice(zip_longest(entries, story + [BLANK] * (room - len(story)), fillvalue=BLANK), room):
            a, b = fitted(a, left), fitted(b, story_width)
            sheet.add((*a, (" " * (left - width_of(a)), "", ""), (" │ ", "muted", ""), *b))


def _story(snap: Snapshot, f: Finding, width: int, room: int) -> list[Line]:
    """Return what is known of a finding in at most `room` lines, with as much source as fits."""
    story, sources = story_lines(f, (), width), _of_finding(snap, f)
    while sources and len(story) + len(sources) * SHORTEST > room:
        sources = sources[:-1]
    if sources:
        each = max(SHORTEST, (room - len(story)) // len(sources) - 1)
        story = story_lines(f, tuple(s.near(each) for s in sources), width)
    return cut(story, room)


def sites_of(f: Finding) -> tuple[tuple[str, int], ...]:
    """Return file and line of the culprit, or of the first rank named, then other lines that ranks are at."""
    found = sorted(f.where, key=lambda w: w.rank not in f.culprits)
    sites = (site for w in (*found, *f.waiting) if (site := _site(w)) is not None)
    return tuple(dict.fromkeys(sites))[:4]


def _site(w: Where) -> tuple[str, int] | None:
    return (w.file, int(w.line)) if w.file and w.line else None


def _of_finding(snap: Snapshot, f: Finding) -> tuple[excerpt.Excerpt, ...]:
    """Return the excerpts of the culprit's line and of one more; none before those of this finding have been read."""
    read = snap.panel.sources if isinstance(snap.panel, FindingsData) else ()
    found = [s for s in read if (s.file, s.line) in sites_of(f)]
    return (*found[:1], *[s for s in found[1:] if s.lines][:1])


def list_entry(f: Finding, width: int, most: int) -> list[Line]:
    """Return a finding in the list: severity, kind and time; what and who in at most so many lines."""
    mark = severity.of_finding(f.severity)
    closed = f.cleared_s is not None
    when = "cleared" if closed else clock(f.detected_s if f.detected_s is not None else f.first_seen_s)
    hit = f"finding:{f.key}"
    style = "muted" if closed else mark.style
    kind = clip(clean(f.kind), width - cells(mark.word) - cells(when) - 7)
    head = line((f" {mark.glyph} {mark.word} ", f"{style} bold", hit), (kind, "muted" if closed else "bold", hit))
    head = (*head, (" " * (width - width_of(head) - cells(when) - 1) + when, "muted", hit))
    rows = wrap(clean(f.message), width - 4, most)
    return [head, *(line((f"   {text}", "muted", hit)) for text in rows)]


def story_lines(f: Finding, sources: Sequence[excerpt.Excerpt], width: int) -> list[Line]:
    """Return the details: what, who, where with the source, cost, what to do, evidence."""
    mark = severity.of_finding(f.severity)
    closed = f.cleared_s is not None
    style = "muted" if closed else mark.style
    title = clean(f.kind) + (f" / {clean(f.cause)}" if f.cause else "")
    certainty = f"   {f.certainty}" if f.certainty else ""
    out = [line((f"{mark.glyph} {mark.word} ", f"{style} bold"), (title, "bold"), (certainty, "muted"))]
    head, rest = head_and_more(clean(f.message))
    out += [line((x, "bold")) for x in wrap(head, width)]

    def section(word: str, texts: Sequence[str], style: str = "") -> None:
        for i, text in enumerate(texts):
            out.extend(labelled(f"{word if i == 0 else '':9} ", text, width, style, of_label="key"))

    def gap() -> None:
        if out[-1]:
            out.append(BLANK)

    gap()
    section("do", [clean(f.advice)] if f.advice else [], "bold")
    section("cost", [clean(f.cost)] if f.cost else [])
    gap()
    names = rank_list(f.culprits) if f.culprits else "nobody can be blamed" if f.victims else ""
    section("who", [names] if names else [])
    if f.victims:
        section(waiting_word(f) if f.culprits else "members", [rank_list(f.victims)], "muted")
    culprits = {_site(w) for w in f.where}
    for word, ranks, most, style in (
        ("where", f.where, 4, ""),
        ("waits at" if waiting_word(f) == "waiting" else "ended at", f.waiting, 2, "muted"),
    ):
        section(word, sites_text(ranks, most), style)
        for source in sources:
            if ((source.file, source.line) in culprits) == (word == "where"):
                out.extend(source_lines(source, width, 10))
    section("names", [names_text(f.names, 12)] if f.names else [])
    section("more", [rest] if rest else [])
    gap()
    times = (("first seen", f.first_seen_s), ("raised", f.detected_s), ("cleared", f.cleared_s))
    when = [f"{word} {clock(t_s)}" for word, t_s in times if t_s is not None]
    section("when", [", ".join([*when, *([f"step {f.step:,}"] if f.step is not None else [])])], "muted")
    if f.collective is not None:
        c = f.collective
        number = f" #{c.seq}" if c.seq is not None else ""
        nbytes = f", {size_text(c.bytes)}" if c.bytes is not None else ""
        apart = f.cause == "op" or any(w.state == "waiting" for w in f.where if w.rank in f.culprits)
        op = "collective" if apart else clean(c.op)  # ranks are in different operations
        section("in", [f"{op}{number} of group {clean(c.group)}{nbytes}"], "muted")
    section("evidence", [clean(e) for e in f.evidence[:4]], "muted")
    return out


def source_lines(source: excerpt.Excerpt, width: int, indent: int) -> list[Line]:
    """Return the excerpt with line numbers and the line marked; or why there is none."""
    pad = " " * indent
    if not source.lines:
        return [line((f"{pad}{clip(source.why, width - indent)}", "muted"))] if source.why else []
    digits = len(str(source.lines[-1][0]))
    shared = min((len(t) - len(t.lstrip()) for _, t in source.lines if t.strip()), default=0)
    out = []
    for n, text in source.lines:
        here = n == source.line
        shown = clip(text[shared:], width - indent - digits - 5)
        out.append(line(pad, ("› " if here else "  ", "error bold"), (f"{n:>{digits}} ", "bold" if here else "muted"),
                        ("│ ", "muted"), (shown, "bold" if here else "")))  # fmt: skip
    if source.why:
        out.append(line((f"{pad}  {clip(source.why, width - indent - 2)}", "muted")))
    return out


def source_blocks(blocks: Sequence[tuple[Line, excerpt.Excerpt]], width: int, room: int) -> list[Line]:
    """Return excerpts with their titles, next to each other and below, in at most `room` lines; empty if none fits."""
    across = max(1, min(len(blocks), width // SOURCE_WIDTH))
    rows = -(-len(blocks) // across)
    while rows > 1 and (room - 1) // rows < SHORTEST + 3:
        rows -= 1
    each = (room - 1) // rows - 2 if rows else 0  # a title, and a blank line below
    if each < SHORTEST:
        return []
    out: list[Line] = []
    for first in range(0, min(len(blocks), rows * across), across):
        made = [
            [fitted(title, width // across - 2), *source_lines(source.near(each), width // across - 2, 3)]
            for title, source in blocks[first : first + across]
        ]
        out += [BLANK, *side_by_side([*made, *[[]] * (across - len(made))], width)]
    return out[:room]


def _event_lines(data: FindingsData, width: int, height: int) -> list[Line]:
    shown = data.events[-(_EVENTS if height >= 30 else 2) :]
    if not shown:
        return []
    out = [rule(width, "monitor events ")]
    for e in shown:
        style = {"error": "error", "warning": "warning"}.get(e.level, "muted")
        out.append(fitted(line((f" {clock(e.t_s)} ", "muted"), (f"{clean(e.source)}: {clean(e.text)}", style)), width))
    return out
