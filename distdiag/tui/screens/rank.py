"""One rank: why is it slow, and what is it doing now?"""

from __future__ import annotations

import math

from distdiag.store.frames import RankRow
from distdiag.store.liveness import Monitor
from distdiag.terms.activity import SHOWN
from distdiag.terms.quantiles import median_low, quantile
from distdiag.terms.signals import signal_name
from distdiag.terms.steps import PHASES, STEP_PARTS
from distdiag.tui.data import rank_data
from distdiag.tui.data.rank_data import RankData
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.draw import severity
from distdiag.tui.draw.lines import BLANK, Line, Screenful, cut, explained, fitted, joined, line, rule, width_of
from distdiag.tui.draw.text import (
    MISSING,
    cells,
    clean,
    clip_left,
    clock,
    counted,
    decimal,
    fit,
    gib,
    integer,
    milliseconds,
    percent,
    place,
    quote,
    rate,
    seconds,
    size,
    spark,
    within,
)
from distdiag.tui.panels import finding_lines, footer_panel, title_line
from distdiag.tui.screens.findings import source_lines
from distdiag.tui.screens.page import Page, Sheet
from distdiag.tui.ui import Ui

HELP = {p.name: p.about for p in STEP_PARTS} | {
    "other": "the rest of the step",
    "backward": "backward pass, with waiting for other ranks in the gradient exchange",
}
WINDOW, WIDEST = 100, 200  # steps that are read
LEFT = 55  # cells before the bars of the steps
SHORTEST = 5  # lines of an excerpt


class RankPage(Page[RankData]):
    name = title = "rank"
    question = "why is it slow, and what is it doing?"
    empty = RankData
    read = staticmethod(rank_data.read)

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        return Request("rank", ui.paused_at_s, ui.rank, window=max(WINDOW, min(WIDEST, width - LEFT)))

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data, job = self.data(snap), job_state(snap)
        data = data if data.rank == ui.rank else RankData(ui.rank or 0)
        at = snap.summary.layout.row_of.get(-1 if ui.rank is None else ui.rank)
        if snap.frame is None or at is None:
            sheet = Sheet(width, height, footer_panel(snap, ui, job, width, max(4, height // 2)))
            sheet.add(title_line(snap, ui, width, f"rank {ui.rank}", self.question), BLANK)
            if snap.problem is None and snap.frame is not None:
                ranks = counted(len(snap.frame.table), "rank")
                sheet.note(f"   rank {ui.rank} is not part of this run, which has {ranks}", "warning")
            return sheet.done()
        row, mark = snap.frame.table.row(at), snap.summary.marks[at]
        sheet = Sheet(width, height, _findings(snap, ui, row.rank, width, max(min(7, height // 3), height // 4)))
        sheet.add(_title(snap, row, mark, width), *_now(row, width))
        stack = _stack(data, row, snap, ui, width, height)
        calls = _collectives(data, 20 if height >= 60 else 8 if height >= 40 else 3)
        phases, facts = _phases(data, snap, at, width), _facts(data, row, width)
        # a stuck rank shows where it is, a running one how long it takes
        still = job.stuck or row.life != "running"
        for block in filter(None, [stack, facts, calls, phases] if still else [phases, facts, stack, calls]):
            sheet.add(*([BLANK] if height >= 22 else []), *block)
        source = data.source
        if source is not None and source.lines and still and sheet.left > SHORTEST + 2:
            site = place(source.file, source.line, row.function)
            shown = source_lines(source.near(min(24, sheet.left - 3)), width, 3)
            sheet.add(BLANK, line((" source ", "muted"), site), *shown)
        sheet.lines = cut(sheet.lines, height - len(sheet.panel))
        return sheet.done()


def _findings(snap: Snapshot, ui: Ui, rank: int, width: int, most: int) -> list[Line]:
    """Return the worst finding about a rank in at most so many lines; one that blames it before others."""
    about = [f for f in snap.open_findings if rank in f.culprits] or [
        f for f in snap.open_findings if rank in f.victims
    ]
    flag = [rule(width), *finding_lines(about[0], width)] if about else []
    return cut(flag, most, ui.opens("5", "findings"))


def _title(snap: Snapshot, row: RankRow, mark: severity.Mark, width: int) -> Line:
    word, style = severity.state_of(row, mark, True)
    device = f" gpu{row.gpu}" if row.gpu is not None else ""
    pid = f"   pid {row.pid}" if row.pid is not None else ""
    left = line(
        (" distdiag > ", "muted"),
        (f"rank {row.rank}", "title"),
        f"   {clean(row.host)}{device}{pid}   ",
        (f"{mark.glyph} {word}", f"{style} bold"),
    )
    return joined(fitted(left, width), line(f"step {integer(row.step)}  {clock(snap.t_s)}"), width)


def _now(row: RankRow, width: int) -> list[Line]:
    doing = f"{clean(row.phase or 'phase not known')} for {seconds(row.phase_age_s)}"
    if row.waiting_op:
        nbytes = size(row.waiting_bytes) if row.waiting_bytes is not None else ""
        doing = f"waits in {clean(row.waiting(nbytes) or '')} for {seconds(row.waiting_age_s)}"
    elif row.activity and row.activity not in ("user_code", row.phase):
        doing += f", {SHOWN.get(row.activity) or clean(row.activity)}"
    out = [line((" now    ", "muted"), doing)]
    if row.file:
        at = place(row.file, row.line, row.function)
        fits = width_of(out[0]) + cells(at) + 6 <= width
        out = [line(*out[0], (f"   at {at}", "bold"))] if fits else [*out, line("        ", (f"at {at}", "bold"))]
    ended = signal_name(row.signal) if row.signal else ""
    if row.exception or ended or row.exit_code:
        code = f"exit code {row.exit_code}" if row.exit_code is not None else ""
        how = ", ".join(x for x in (ended, clean(row.exception or ""), code) if x)
        out.append(line((" ended  ", "muted"), (how, "error")))
    if row.recorder_errors:
        failed = f"the recorder failed {counted(row.recorder_errors, 'time')} here: {clean(row.recorder_error or '?')}"
        out.append(line((" note   ", "muted"), (failed, "warning")))
    return out


def _phases(data: RankData, snap: Snapshot, at: int, width: int) -> list[Line]:
    if not data.steps:
        return [line((" no step of this rank has ended yet", "muted"))]
    assert snap.frame is not None
    bars = max(8, min(len(data.steps), width - LEFT))
    n = min(len(data.steps), bars)
    many = len(data.steps) >= 100
    reference = f"median of the {snap.summary.n - 1:,} other ranks" if snap.summary.n > 2 else "the other rank"
    head = (
        f" {'phase':10}{'now':>8}{'p50':>8}{'mean':>8}{'p99' if many else 'max':>8}{'others':>8}   last {n} steps, ms"
    )
    out = [line((head, "head"))]
    for name in (*PHASES, "wait", "self", "step"):
        column = f"{name}_ms"
        values = [getattr(s, column) for s in data.steps]
        known = sorted(v for v in values if v is not None and math.isfinite(v))
        if not known:
            continue
        theirs = snap.frame.table.numbers(column)
        others = median_low([v for i, v in enumerate(theirs) if v == v and i != at])
        p50, top = quantile(known, 0.5), quantile(known, 0.99) if many else known[-1]
        mean = math.fsum(known) / len(known)  # pauses are in it, and in no median
        more = p50 - others if p50 is not None and others is not None else 0.0
        off = name not in ("wait", "step") and more > 0.05 * (snap.summary.step_ms or math.inf)
        texts = "".join(f"{milliseconds(v):>8}" for v in (values[-1], p50, mean, top, others))
        made = line(
            (f" {name:10}", "bold" if name in ("self", "step") else ""),
            (texts, "warning" if off else ""),
            "   ",
            (spark(values, bars), "accent"),
        )
        out.append(explained(made, name, HELP.get(name, "")))
    out.append(line((f" others = {reference}; self = step - wait", "muted")))
    return out


def _collectives(data: RankData, at_most: int) -> list[Line]:
    if not data.collectives:
        return [line((" no collective has completed on all its ranks yet", "muted"))]
    head = f" {'last collectives':24}{'size':>10}{'transfer':>12}{'skew':>12}   {'arrived':8}{'seq':>9}"
    out = [line((head, "head"))]
    for c in data.collectives[:at_most]:
        name = fit(f"{clean(c.op)} {clean(c.pgroup)}", 24)
        times = "".join(f"{MISSING if us is None else f'{us / 1e3:.2f} ms':>12}" for us in (c.duration_us, c.skew_us))
        arrived = (fit("last", 8), "warning") if c.late_rank == data.rank else (fit("·", 8), "muted")
        out.append(line(f" {name}{size(c.bytes):>10}{times}   ", arrived, f"{c.seq:>9}"))
    return out


def _stack(data: RankData, row: RankRow, snap: Snapshot, ui: Ui, width: int, height: int) -> list[Line]:
    if data.stack is None:
        hint = f"   distdiag dump {quote(snap.run)} takes whole stacks" if snap.monitor is Monitor.LIVE else ""
        at = place(row.file, row.line, row.function, width - 20)
        return [line((" stack  ", "muted"), at, (hint, "muted"))]
    out = [line((f" stack, taken at {clock(data.stack_t_s)}, innermost first", "head"))]
    frames = list(reversed(data.stack.stack)) or [data.stack.note or "no stack"]
    at_most = 4 if height < 40 else 16
    shown = [clean(f).rpartition(" ") for f in frames[:at_most]]
    site = min(max(40, min(90, width // 2)), max(cells(at) for _, _, at in shown))
    for function, _, at in shown:
        out.append(line(f"   {fit(clip_left(at, site), site)}  ", function))
    if len(frames) > at_most:
        more = f"   {counted(len(frames) - at_most, 'more frame')}: {ui.opens('7', 'stacks')}"
        out.append(line((more, "muted", "do:show('stacks')")))
    return out


def _facts(data: RankData, row: RankRow, width: int) -> list[Line]:
    """Return process, host and GPU, each on one line."""
    out: list[list[str]] = []
    p, h, g = data.process, data.host, data.gpu
    if p or row.rss_bytes:
        cpu, rss = (p.cpu_pct, p.rss_bytes) if p else (row.cpu_pct, row.rss_bytes)
        out.append([f" process  CPU {percent(cpu)}", f"rss {gib(rss)} GiB"])
    if p:
        children = f"{counted(p.children, 'child', 'children')} at {percent(p.children_cpu_pct)}"
        out[-1] += [counted(p.threads, "thread"), children, f"reads {rate(p.read_bytes_per_s)}"]
    if h:
        memory = f"memory {gib(h.memory_used_bytes)} of {gib(h.memory_total_bytes)} GiB"
        cpu = f" host     CPU {percent(h.cpu_pct)} of {integer(h.cores)}"
        out.append([cpu, f"load {decimal(h.load1)}", memory, f"disk read {rate(h.disk_read_bytes_per_s)}"])
    if g:
        throttle = f"throttled: {clean(g.throttle)}" if g.throttle else "not throttled"
        use = f" gpu {g.gpu:<4} {clean(g.name or '')} {percent(g.utilization_pct)}"
        memory = f"{gib(g.memory_used_bytes)} of {gib(g.memory_total_bytes)} GiB"
        out.append([use, memory, f"{decimal(g.power_w, 0)} W", f"{decimal(g.temperature_c, 0)} °C", throttle])
        known = [
            f"{name} {spark(values, 12)}" for name, values in data.gpu_history if any(v is not None for v in values)
        ]
        out += [[f" minute   {known[0]}", *known[1:]]] if known else []
    return [line(within(parts, width)) for parts in out]
