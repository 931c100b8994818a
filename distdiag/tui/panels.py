"""The head of every screen (name, state, clock, speed, memory) and its foot: findings as four lines."""

from __future__ import annotations

from collections.abc import Sequence

from distdiag.diagnosis.model.findings import Finding, Where, rank_list
from distdiag.diagnosis.text.finding import head_and_more
from distdiag.terms.activity import SHOWN
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.data.state import JobState, closing_lines, job_state
from distdiag.tui.draw import severity
from distdiag.tui.draw.lines import BLANK, Line, cut, fitted, joined, labelled, line, rule, width_of
from distdiag.tui.draw.text import (
    cells,
    clean,
    clip,
    clip_left,
    clock,
    counted,
    decimal,
    gib,
    integer,
    milliseconds,
    percent,
    place,
    quote,
    seconds,
    spark,
)
from distdiag.tui.ui import Ui


def state_line(snap: Snapshot, job: JobState, width: int) -> Line:
    """Return ` distdiag  NAME  ● RUNNING  8 ranks / 1 node  gloo  00:04:31   reports/x`.

    Where it is narrow the path, the backend and then the name give way; the state and its text never do.
    """
    name = clean(snap.meta.get("name") or "") or clean(snap.run.name)
    attempt = snap.number("attempt")
    if attempt:
        name += f" (attempt {int(attempt)})"
    time = clock(snap.t_s) if snap.frame is not None else ""
    backend = clean(snap.meta.get("backend") or "")
    path = quote(snap.run)

    def build(name: str, text: str, backend: str, time: str) -> Line:
        state = f"{job.glyph} {job.word}"
        parts = ((name, "bold"), (state, f"{job.style} bold"), (text, ""), (backend, "muted"), (time, ""))
        return line((" distdiag", "title"), *(p for part in parts if part[0] for p in ("  ", part)))

    narrower = ((36, backend, time), (24, backend, time), (16, backend, time), (16, "", time), (10, "", time))
    for name_width, *more in (*narrower, (0, "", time), (0, "", "")):
        out = build(clip(name, name_width), job.text, *more)
        if width_of(out) <= width:
            room = width - width_of(out) - 3
            full = (*out, ("   ", "", ""), (clip_left(path, room), "muted", ""))
            return full if room >= min(24, cells(path)) else out
    return build("", clip(job.text, width - width_of(build("", "", "", "")) - 2), "", "")


def step_line(snap: Snapshot, job: JobState, width: int, steps_ms: Sequence[float | None]) -> Line:
    """Return ` step 1203/2000  231 ms ▂▃▃▇█▇  18,450 samples/s  loss 0.512  mem max 62.2 GiB`."""
    s = snap.summary
    if snap.frame is None:
        return BLANK
    total = snap.number("max_steps")
    step = f" step {integer(s.step)}" + (f"/{int(total)}" if total else "")
    left: list[str | tuple[str, str]] = [step]
    if s.step is not None and s.step_behind is not None and s.step - s.step_behind > 1:
        left.append((f" (last rank {s.step_behind})", "muted"))
    if s.step is None or not s.step:
        left.append(("   no step yet: the first one includes compilation and the backend's set-up", "muted"))
        return fitted(line(*left), width)
    took = f"{milliseconds(s.step_ms)} ms" if s.step_ms is not None and not job.stuck else "– ms"
    left += ["  ", took, " "]
    tail: list[str] = []
    if s.samples_per_s and not job.stuck:
        tail.append(f"{decimal(s.samples_per_s, 0)} samples/s")
    if s.loss is not None:
        tail.append(f"loss {s.loss:.4g}")
    if s.wait_mean is not None and s.step_ms and not job.stuck:
        tail.append(f"waiting {percent(100 * s.wait_mean / s.step_ms)}")
    if s.memory_max_bytes:
        tail.append(f"{'device' if s.on_device else 'memory'} max {gib(s.memory_max_bytes)} GiB")
    if s.epoch is not None:
        tail.append(f"epoch {s.epoch}")
    used = width_of(line(*left))
    while tail and used + 12 + sum(cells(t) + 2 for t in tail) > width:
        tail.pop()
    bars = spark(steps_ms, max(8, min(60, width - used - sum(cells(t) + 2 for t in tail))))
    left.append((bars, "accent"))
    left += [f"  {t}" for t in tail]
    return fitted(line(*left), width)


def title_line(snap: Snapshot, ui: Ui, width: int, title: str, question: str, right: str = "") -> Line:
    """Return ` distdiag > comm   is the network the cause, or a rank?      RUNNING 00:04:31`: the header of the inner screens."""
    job = job_state(snap)
    end = line(
        (f"{job.glyph} {job.word}", f"{job.style} bold"), f" {clock(snap.t_s)}" if snap.frame is not None else ""
    )
    left = line((" distdiag > ", "muted"), (title, "title"), f"   {question}")
    if right:
        long = (*left, (f"   {right}", "muted", ""))
        if width_of(long) + width_of(end) < width:
            left = long
    if width_of(left) + width_of(end) >= width:
        left = line(
            (" > ", "muted"), (title, "title"), f"  {clip(question, max(0, width - width_of(end) - cells(title) - 7))}"
        )
    return joined(left, end, width)


WHOLE_FROM = 30  # lines of a screen that shows a finding as a whole, whatever its subject


def sites_text(wheres: Sequence[Where], most: int) -> list[str]:
    """Return `ranks 0, 3: train.py:118 in next_batch (waiting for data)` of each of the first `most` sites."""
    ranks: dict[str, list[int]] = {}
    for w in wheres:
        state = f" ({SHOWN.get(w.state) or clean(w.state)})" if w.state else ""
        at = place(w.file, w.line, w.function) if w.file else ""
        ranks.setdefault(f"{at}{state}".strip() or "site unknown", []).append(w.rank)
    texts = [f"{rank_list(found)}: {text}" for text, found in ranks.items()]
    return [*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])]


def names_text(names: Sequence[str], most: int) -> str:
    return ", ".join(map(clean, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def finding_lines(f: Finding, width: int, full: bool = True, message_only: bool = False) -> list[Line]:
    """Return a finding: what it is (wrapped, never cut), and what to do, cost, where, and more of a long message.

    Without `full` it is one line, cut with an ellipsis. Texts in it come from the job: they are cleaned here.
    """
    mark, text = severity.of_finding(f.severity), clean(f.kind)
    head, rest = head_and_more(clean(f.message)) if full and not message_only else (clean(f.message), "")
    text += f"  {head}" if head else ""
    closed = f.cleared_s is not None
    style = "muted" if closed else mark.style
    hit = f"finding:{f.key}"
    lead = f" {mark.glyph} {mark.word} "
    text += "" if f.certainty == "proved" or f.severity == "info" else " (suspected)"
    if closed:
        held = seconds((f.cleared_s or 0.0) - f.first_seen_s) if f.first_seen_s is not None else "some time"
        text += f"; cleared after {held}"
    if not full:
        return [
            line((lead, f"{style} bold", hit), (clip(text, width - cells(lead) - 1), "muted" if closed else "", hit))
        ]
    out = labelled(lead, text, width - 1, "muted" if closed else "", hit, of_label=f"{style} bold")
    if message_only:
        return out
    details = [("do", clean(f.advice))] if f.advice else []
    if f.cost:
        details.append(("cost", clean(f.cost)))
    if f.where:
        details.append(("where", "; ".join(sites_text(f.where, 2))))
    if f.names:
        details.append(("names", names_text(f.names, 3)))
    if rest:
        details.append(("more", rest))
    for word, value in details:
        out += labelled(f"   {word:6}  ", value, width, "muted" if closed else "", hit)
    return out


def _notices(snap: Snapshot, job: JobState, width: int) -> list[Line]:
    """Notices about reading the run itself, shown before any finding."""
    out: list[Line] = []
    if cells(f" distdiag  {job.glyph} {job.word}  {job.text}") > width:  # the first line had to cut it
        out += labelled(f" {job.glyph} ", job.text, width - 1, of_label=job.style)
    if job.do:
        out += labelled(f"   {'do':6}  ", job.do, width)
    if snap.note:
        out.append(line(("   note    ", "muted"), clip(clean(snap.note), width - 11)))
    return out


def footer_panel(snap: Snapshot, ui: Ui, job: JobState, width: int, height: int) -> list[Line]:
    """Return rule and findings in at most `height` lines; on screens under 30 rows only the first finding is complete.

    The last line counts what is left out.
    """
    if height < 2:
        return []
    findings = snap.open_findings
    if snap.problem is None and findings:
        body = _some_findings(snap, findings, job, ui, width, height - 1)
    elif snap.problem is None and job.word in ("ENDED", "FAILED"):
        body = [line((f" {t}", "" if i else "bold")) for i, t in enumerate(closing_lines(snap, ui.interactive))]
    else:
        body = _notices(snap, job, width)
        if not body and snap.frame is not None:
            cleared = f"; {len(snap.findings)} cleared: {ui.opens('5', 'findings')}" if snap.findings else ""
            until = " up to this moment" if snap.at_s is not None else ""
            body.append(line((f" · no {'open ' if cleared else ''}findings{until}{cleared}", "muted")))
    return [rule(width), *(fitted(x, width) for x in body[: height - 1])]


def _some_findings(
    snap: Snapshot, findings: tuple[Finding, ...], job: JobState, ui: Ui, width: int, height: int
) -> list[Line]:
    if height <= 2:
        worst, *others = findings
        return _two_lines(worst, width, f"   +{len(others)}: {ui.opens('5', 'findings')}" if others else "")
    body: list[Line] = []
    if job.word == "MONITOR GONE":
        body += _notices(snap, job, width)
    shown = 0
    for i, f in enumerate(findings):
        full = finding_lines(f, width)
        rest = len(findings) - i - 1
        room = height - len(body) - (1 if rest else 0)
        if (i == 0 or height >= 14) and len(full) <= room:
            body += full
        elif i == 0 and room == 2:
            body += _two_lines(f, width, "")
        elif i == 0 and room >= 2:
            body += cut(full, room, ui.opens("5", "findings"))
        elif room >= 1:
            body += finding_lines(f, width, full=False)
        else:
            break
        shown += 1
    left = len(findings) - shown
    if left:
        how = "press 5" if ui.interactive else f"distdiag diagnose {quote(snap.run)}"
        body.append(line((f"   {counted(left, 'more finding')}: {how}", "muted", "do:show('findings')")))
    elif len(body) < height and job.word in ("DEADLOCK", "FAILED", "LOST"):
        verb = "dump" if job.word == "DEADLOCK" else "report"
        body.append(line(("   more    ", "muted"), (f"distdiag {verb} {quote(snap.run)}", "muted")))
    return body


def brief_panel(snap: Snapshot, ui: Ui, width: int, height: int) -> list[Line]:
    """Return rule and findings for screens with another subject: two lines, or a quarter of a high screen."""
    return footer_panel(snap, ui, job_state(snap), width, min(height // 4, 14) if height >= WHOLE_FROM else 3)


def _two_lines(f: Finding, width: int, more: str) -> list[Line]:
    """Return what and who in at most two lines, the last one with how many `more` findings there are."""
    lines = finding_lines(f, width, message_only=True)
    shown = lines[:2]
    last = fitted((*shown.pop(), (" …" if len(lines) > 2 else "", "", "")), width - cells(more))
    return [*shown, line(*last, (more, "muted", "do:show('findings')"))]
