"""One rank: why is it slow, and what is it doing now?"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from distdiag.diagnosis.model.findings import State
from distdiag.store import stacks as store
from distdiag.store.frames import Frame, RankRow
from distdiag.store.liveness import number
from distdiag.store.reader import Run
from distdiag.store.rows import CollectiveRow, GpuRow, HostRow, ProcessRow, StepRow
from distdiag.terms.activity import SHOWN
from distdiag.tui.data.snapshot import Request, Snapshot
from distdiag.tui.data.state import job_state
from distdiag.tui.draw import excerpt, severity
from distdiag.tui.draw.lines import BLANK, Line, Screenful, cut_line, explained, fitted, joined, line, rule, width_of
from distdiag.tui.draw.palette import ABOUT
from distdiag.tui.draw.text import (
    cells,
    clean,
    clip_left,
    clock,
    counted,
    decimal,
    fit,
    gib,
    integer,
    median_low,
    milliseconds,
    percent,
    place,
    quantile,
    quote,
    rate,
    seconds,
    size,
    spark,
)  # fmt: skip
from distdiag.tui.header import title_line
from distdiag.tui.panels import finding_lines, footer_panel
from distdiag.tui.screens.findings import source_lines
from distdiag.tui.ui import Ui

PHASES = (
    ("data", "data_ms"), ("h2d", "h2d_ms"), ("forward", "forward_ms"), ("backward", "backward_ms"),
    ("optimizer", "optimizer_ms"), ("other", "other_ms"), ("wait", "wait_ms"), ("self", "self_ms"), ("step", "step_ms"),
)  # fmt: skip
HELP = ABOUT | {
    "h2d": "copies to the device",
    "other": "the rest of the step",
    "backward": "backward pass, with waiting for other ranks in the gradient exchange",
    "self": "step - wait: the rank's own time",
    "step": "from the end of one optimizer step to the end of the next",
}
WINDOW, WIDEST = 100, 200  # steps that are read
LEFT = 47  # cells before the bars of the steps
SHORTEST = 5  # lines of an excerpt
GPU_HISTORY_S = 60.0
GPU_HISTORY = (
    ("use", "utilization_pct"),
    ("memory", "memory_used_bytes"),
    ("power", "power_w"),
    ("°C", "temperature_c"),
)


@dataclass(frozen=True)
class RankData:
    """Everything of one rank beyond its row in the frame."""

    rank: int
    steps: tuple[StepRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    stack: store.RankStack | None = None
    stack_t_s: float | None = None
    process: ProcessRow | None = None
    host: HostRow | None = None
    gpu: GpuRow | None = None
    gpu_history: tuple[tuple[str, tuple[float | None, ...]], ...] = ()  # of the last minute: name, values
    source: excerpt.Excerpt | None = None  # around its line, if it makes no progress


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> RankData | None:
    if request.rank is None:
        return None
    rank = request.rank
    at = next((i for i, r in enumerate(frame.table.numbers("rank")) if r == rank), None)
    row = frame.table.row(at) if at is not None else RankRow(rank=rank)
    span = run.step_range(request.at_s)
    steps = run.steps(max(span[0], span[1] - request.window + 1), span[1], [rank]) if span else []
    still = frame.state not in (State.RUNNING, State.DEGRADED) or row.life != "running"
    sites = [(row.file, int(row.line))] if still and row.file and row.line else []
    found = store.read(run.path)
    gpus = run.gpus(request.at_s)
    gpu = next(
        (
            g
            for g in gpus
            if g.rank == rank or (g.rank is None and row.gpu is not None and (g.node, g.gpu) == (row.node, row.gpu))
        ),
        None,
    )
    end = gpu.t_s if gpu is not None else 0.0
    history = [
        (name, tuple(v for _, v in run.history("gpu", column, end - GPU_HISTORY_S, end, node=gpu.node, gpu=gpu.gpu)))
        for name, column in GPU_HISTORY
        if gpu is not None
    ]
    members = {g.name: g.ranks for g in run.groups()}
    collectives = [c for c in run.collectives(10, request.at_s, 400) if rank in members.get(c.pgroup, (rank,))]
    return RankData(
        rank=rank,
        steps=tuple(steps),
        collectives=tuple(collectives[:20]),
        stack=found.ranks.get(str(rank)) if found else None,
        stack_t_s=found.t_s if found else None,
        process=next((p for p in run.processes(request.at_s) if p.rank == rank), None),
        host=next((h for h in run.hosts(request.at_s) if h.node == row.node), None),
        gpu=gpu,
        gpu_history=tuple(history),
        source=next(iter(excerpt.cached(sites, number(run.meta.get("started_unix_s")), cache)), None),
    )


class RankPage:
    name = "rank"
    title = "rank"
    question = "why is it slow, and what is it doing?"

    def request(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Request:
        return Request("rank", ui.paused_at_s, ui.rank, window=max(WINDOW, min(WIDEST, width - LEFT)))

    def items(self, snap: Snapshot, ui: Ui) -> Sequence[Hashable]:
        return []

    def render(self, snap: Snapshot, ui: Ui, width: int, height: int) -> Screenful:
        data = snap.panel if isinstance(snap.panel, RankData) and snap.panel.rank == ui.rank else RankData(ui.rank or 0)
        table = snap.frame.table if snap.frame is not None else None
        at = next((i for i, r in enumerate(table.numbers("rank")) if r == ui.rank), None) if table is not None else None
        if table is None or at is None:
            lines = [title_line(snap, ui, width, f"rank {ui.rank}", self.question), BLANK]
            if snap.problem is None and table is not None:
                lines += [
                    line(
                        (
                            f"   rank {ui.rank} is not part of this run, which has {counted(len(table), 'rank')}",
                            "warning",
                        )
                    )
                ]
            panel = footer_panel(snap, ui, job_state(snap), width, max(4, height // 2))
            return Screenful([*lines, *[BLANK] * (height - len(lines) - len(panel)), *panel][:height])
        row, mark = table.row(at), snap.summary.marks[at]
        job = job_state(snap)
        lines = [_title(snap, row, mark, width), *_now(row, snap, job.stuck, width)]
        mine = [f for f in snap.open_findings if row.rank in f.culprits] or [
            f for f in snap.open_findings if row.rank in f.victims
        ]
        flag = [rule(width), *finding_lines(mine[0], width)] if mine else []
        if len(flag) > (most := max(4, height // 4)):
            flag = [*flag[: most - 1], cut_line(len(flag) - most + 1)]
        room = height - len(flag)
        stack, calls = (
            _stack(data, row, snap, ui, width, height),
            _collectives(data, width, 20 if height >= 60 else 8 if height >= 40 else 3),
        )
        phases = _phases(data, snap, at, width)
        # a stuck rank shows where it is, a running one how long it takes
        facts = _facts(data, row, width)
        still = job.stuck or row.life != "running"
        blocks = [stack, facts, calls, phases] if still else [phases, facts, stack, calls]
        for block in filter(None, blocks):
            lines += [BLANK, *block] if height >= 22 else block
        if data.source is not None and data.source.lines and still and room - len(lines) > SHORTEST + 2:
            at = place(data.source.file, data.source.line, row.function)
            shown = source_lines(data.source.near(min(24, room - len(lines) - 3)), width, 3)
            lines += [BLANK, line((" source ", "muted"), at), *shown]
        if len(lines) > room:
            lines = [*lines[: room - 1], cut_line(len(lines) - room + 1)]
        lines = [fitted(x, width) for x in lines]
        lines += [BLANK] * (room - len(lines))
        return Screenful([*lines, *flag][:height])


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


def _now(row: RankRow, snap: Snapshot, stuck: bool, width: int) -> list[Line]:
    """Return a sentence about what the rank does now."""
    doing = f"{clean(row.phase or 'phase not known')} for {seconds(row.phase_age_s)}"
    if row.waiting_op:
        number = f" #{row.waiting_seq}" if row.waiting_seq is not None else ""
        doing = f"waits in {clean(row.waiting_op)}{number} ({clean(row.waiting_group or '?')}, {size(row.waiting_bytes)}) for {seconds(row.waiting_age_s)}"
    elif row.activity and row.activity not in ("user_code", row.phase):
        doing += f", {SHOWN.get(row.activity) or clean(row.activity)}"
    out = [line((" now    ", "muted"), doing)]
    if row.file:
        at = place(row.file, row.line, row.function)
        fits = width_of(out[0]) + cells(at) + 6 <= width
        out = [line(*out[0], (f"   at {at}", "bold"))] if fits else [*out, line("        ", (f"at {at}", "bold"))]
    ended = severity.signal_name(row.signal) if row.signal else ""
    if row.exception or ended or row.exit_code:
        code = f"exit code {row.exit_code}" if row.exit_code is not None else ""
        out.append(
            line((" ended  ", "muted"), (", ".join(x for x in (ended, clean(row.exception or ""), code) if x), "error"))
        )
    if row.recorder_errors:
        out.append(
            line(
                (" note   ", "muted"),
                (
                    f"the recorder failed {counted(row.recorder_errors, 'time')} here: {clean(row.recorder_error or '?')}",
                    "warning",
                ),
            )
        )
    return [fitted(x, width) for x in out]


def _phases(data: RankData, snap: Snapshot, at: int, width: int) -> list[Line]:
    if not data.steps:
        return [line((" no step of this rank has ended yet", "muted"))]
    assert snap.frame is not None
    bars = max(8, min(len(data.steps), width - LEFT))
    n = min(len(data.steps), bars)
    many = len(data.steps) >= 100
    reference = f"median of the {snap.summary.n - 1:,} other ranks" if snap.summary.n > 2 else "the other rank"
    out = [
        line(
            (
                f" {'phase':10}{'now':>8}{'p50':>8}{'p99' if many else 'max':>8}{'others':>8}   last {n} steps, ms",
                "head",
            )
        )
    ]
    for name, column in PHASES:
        values = [getattr(s, column) for s in data.steps]
        known = sorted(v for v in values if v is not None and math.isfinite(v))
        if not known:
            continue
        theirs = snap.frame.table.numbers(column)
        others = median_low([v for i, v in enumerate(theirs) if v == v and i != at])
        p50, top = quantile(known, 0.5), quantile(known, 0.99) if many else known[-1]
        off = (
            name not in ("wait", "step")
            and others is not None
            and p50 is not None
            and p50 - others > 0.05 * (snap.summary.step_ms or math.inf)
        )
        texts = "".join(f"{milliseconds(v):>8}" for v in (values[-1], p50, top, others))
        made = line(
            (f" {name:10}", "bold" if name in ("self", "step") else ""),
            (texts, "warning" if off else ""),
            "   ",
            (spark(values, bars), "accent"),
        )
        out.append(explained(made, name, HELP.get(name, "")))
    out.append(line((f" others = {reference}; self = step - wait", "muted")))
    return out


def _collectives(data: RankData, width: int, at_most: int) -> list[Line]:
    if not data.collectives:
        return [line((" no collective has completed on all its ranks yet", "muted"))]
    out = [
        line((f" {'last collectives':24}{'size':>10}{'transfer':>12}{'skew':>12}   {'arrived':8}{'seq':>9}", "head"))
    ]
    for c in data.collectives[:at_most]:
        name = fit(f"{clean(c.op)} {clean(c.pgroup)}", 24)
        transfer = "–" if c.duration_us is None else f"{c.duration_us / 1e3:.2f} ms"
        skew = "–" if c.skew_us is None else f"{c.skew_us / 1e3:.2f} ms"
        last = c.late_rank == data.rank
        out.append(
            line(
                f" {name}{size(c.bytes):>10}{transfer:>12}{skew:>12}   ",
                (fit("last" if last else "·", 8), "warning" if last else "muted"),
                f"{c.seq:>9}",
            )
        )
    return out


def _stack(data: RankData, row: RankRow, snap: Snapshot, ui: Ui, width: int, height: int) -> list[Line]:
    if data.stack is None:
        hint = f"distdiag dump {quote(snap.run)} takes whole stacks"
        return [
            fitted(
                line(
                    (" stack  ", "muted"), place(row.file, row.line, row.function, width - 20), (f"   {hint}", "muted")
                ),
                width,
            )
        ]
    out = [line((f" stack, taken at {clock(data.stack_t_s)}, innermost first", "head"))]
    frames = list(reversed(data.stack.stack)) or [data.stack.note or "no stack"]
    at_most = 4 if height < 40 else 16
    shown = [clean(f).rpartition(" ") for f in frames[:at_most]]
    site = min(max(40, min(90, width // 2)), max(cells(at) for _, _, at in shown))
    for function, _, at in shown:
        out.append(line(f"   {fit(clip_left(at, site), site)}  ", function))
    if len(frames) > at_most:
        out.append(
            line(
                (
                    f"   {counted(len(frames) - at_most, 'more frame')}: {ui.opens('7', 'stacks')}",
                    "muted",
                    "do:show('stacks')",
                )
            )
        )
    return out


def _facts(data: RankData, row: RankRow, width: int) -> list[Line]:
    """Return process, host and GPU, each on one line."""
    out = []
    p, h, g = data.process, data.host, data.gpu
    if p or row.rss_bytes:
        rss = p.rss_bytes if p else row.rss_bytes
        parts = [f" process  CPU {percent(p.cpu_pct if p else row.cpu_pct)}", f"rss {gib(rss)} GiB"]
        if p:
            parts += [
                counted(p.threads, "thread"),
                f"{counted(p.children, 'child', 'children')} at {percent(p.children_cpu_pct)}",
                f"reads {rate(p.read_bytes_per_s)}",
            ]
        out.append(_within(parts, width))
    if h:
        out.append(
            _within(
                [
                    f" host     CPU {percent(h.cpu_pct)} of {integer(h.cores)}",
                    f"load {decimal(h.load1)}",
                    f"memory {gib(h.memory_used_bytes)} of {gib(h.memory_total_bytes)} GiB",
                    f"disk read {rate(h.disk_read_bytes_per_s)}",
                ],
                width,
            )
        )
    if g:
        throttle = f"throttled: {clean(g.throttle)}" if g.throttle else "not throttled"
        out.append(
            _within(
                [
                    f" gpu {g.gpu:<4} {clean(g.name or '')} {percent(g.utilization_pct)}",
                    f"{gib(g.memory_used_bytes)} of {gib(g.memory_total_bytes)} GiB",
                    f"{decimal(g.power_w, 0)} W",
                    f"{decimal(g.temperature_c, 0)} °C",
                    throttle,
                ],
                width,
            )
        )
        drawn = [
            f"{name} {spark(values, 12)}" for name, values in data.gpu_history if any(v is not None for v in values)
        ]
        if drawn:
            out.append(_within([" minute   " + drawn[0], *drawn[1:]], width))
    return out


def _within(parts: list[str], width: int) -> Line:
    while len(parts) > 1 and cells("   ".join(parts)) > width:
        parts.pop()
    return line("   ".join(parts))
