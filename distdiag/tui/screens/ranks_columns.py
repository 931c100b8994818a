"""Columns of the rank table: times while the job runs, sites while it is stuck."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.store.frames import RankRow
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw import bars, severity
from distdiag.tui.draw.lines import Part
from distdiag.tui.draw.table import Cell, Column
from distdiag.tui.draw.text import (
    cells,
    clean,
    decimal,
    delta,
    fit,
    gib,
    integer,
    milliseconds,
    place,
    seconds,
    short_size,
)
from distdiag.tui.ui import Ui

BAR_FROM = 72  # cells of a screen that has room for the bar of each row
GAUGE = 6  # cells of a small bar after a number


@dataclass(frozen=True)
class Capacity:
    """What a rank's small bars are measured against; None where not measured."""

    gpu_pct: float | None = None
    gpu_memory_total: float | None = None
    host_memory_total: float | None = None


NOTHING = Capacity()


@dataclass(frozen=True)
class Shown:
    """One row: the rank, its mark, and what the cells need around it."""

    row: RankRow
    mark: severity.Mark
    snap: Snapshot
    ui: Ui
    stuck: bool
    capacity: Capacity = NOTHING
    scale_ms: float = 0.0  # the longest step of all ranks: the width of every bar


def _delta(s: Shown) -> Cell:
    d, step = s.row.delta_self_ms, s.row.step_ms
    if d is None or not step:
        return delta(d)
    share = 100 * d / step
    style = "error" if share >= s.ui.error_pct else "warning" if share >= s.ui.warn_pct else ""
    return delta(d), style


def _last(s: Shown) -> Cell:
    op, nbytes = (s.row.waiting_op, s.row.waiting_bytes) if s.row.waiting_op else (s.row.last_op, s.row.last_bytes)
    return f"{clean(op)} {short_size(nbytes)}".rstrip() if op else "–"


def _sequence(s: Shown) -> Cell:
    return integer(s.row.waiting_seq if s.row.waiting_op and s.row.waiting_seq is not None else s.row.last_seq)


def _phase(s: Shown) -> Cell:
    return "comm" if s.row.waiting_op else clean(s.row.phase or "–")


def _in_phase(s: Shown) -> Cell:
    return seconds(s.row.waiting_age_s if s.row.waiting_op else s.row.phase_age_s)


def _memory(s: Shown) -> Cell:
    return gib(s.row.device_bytes if s.row.device_bytes is not None else s.row.rss_bytes)


_CPU = "of one core, this process"


def _cpu(s: Shown) -> Cell:
    return decimal(s.row.cpu_pct, 0)


def _share(value: float | None, total: float | None) -> float | None:
    return None if value is None or not total else value / total


def _with_gauge(s: Shown, width: int, text: str, share: float | None, hot: float = 2.0) -> list[Part]:
    """A number, and after it a small bar of the share; the bar turns hot from `hot` on."""
    style = "hot" if share is not None and share >= hot else "fill"
    return [
        (fit(text, width - GAUGE - 1, ">") + " ", "", ""),
        *bars.gauge(share, GAUGE, colour=s.ui.drawn, style=style),
    ]


def _memory_parts(s: Shown, width: int) -> list[Part]:
    c = s.capacity
    if s.row.device_bytes is not None:
        share = _share(s.row.device_bytes, c.gpu_memory_total)
    else:
        share = _share(s.row.rss_bytes, c.host_memory_total)
    return _with_gauge(
        s, width, gib(s.row.device_bytes if s.row.device_bytes is not None else s.row.rss_bytes), share, 0.95
    )


def _cpu_parts(s: Shown, width: int) -> list[Part]:
    return _with_gauge(s, width, decimal(s.row.cpu_pct, 0), _share(s.row.cpu_pct, 100))


def _gpu_parts(s: Shown, width: int) -> list[Part]:
    return _with_gauge(s, width, decimal(s.capacity.gpu_pct, 0), _share(s.capacity.gpu_pct, 100))


def _bar_parts(s: Shown, width: int) -> list[Part]:
    if not s.row.step_ms:
        return [(fit("–", width), "muted", "")]
    # a word in every bar is noise: the legend is in the head
    words = s.mark.level >= severity.WARN.level
    return bars.stacked(bars.phases_of(s.row), s.scale_ms, width, colour=s.ui.drawn, words=words)


def _at(s: Shown) -> Cell:
    text = place(s.row.file, s.row.line, s.row.function).replace(" in ", " ", 1)
    return (text, s.mark.style) if s.mark.level >= severity.WARN.level else text


def _state(s: Shown) -> Cell:
    return severity.state_of(s.row, s.mark, s.stuck)


def host_width(snap: Snapshot) -> int:
    """Cells of the node column: as wide as the longest host name, from 8 to 20."""
    return max(8, min(20, max((cells(clean(h.split(".")[0])) for h in snap.summary.node_of.values()), default=8)))


def short_host(host: str) -> str:
    """The host without its domain; an address stays whole."""
    return clean(host if host.replace(".", "").isdigit() else host.split(".")[0]) or "–"


def columns_for(snap: Snapshot, ui: Ui, stuck: bool, screen: int = 200) -> list[Column[Shown]]:
    """Columns of the table in this state, on a screen of so many cells; `choose` takes those that fit."""
    one_node = snap.summary.nodes <= 1
    digits = max(4, len(str(max(snap.summary.n - 1, 0))) + 1)
    rank = Column[Shown]("rank", "rank", digits, "global rank", lambda s: str(s.row.rank))
    host = Column[Shown](
        "node",
        "node",
        host_width(snap),
        "host the rank runs on",
        lambda s: short_host(s.row.host),
        "<",
        3 if one_node else 0,
    )
    state = Column[Shown](
        "", "state", 8, "worst open finding that names the rank, or what happened to its process", _state, "<", 0, 6
    )
    gpu = Column[Shown]("", "gpu", 3, "index of the rank's device on its node", lambda s: integer(s.row.gpu), ">", 13)
    step = Column[Shown]("step", "step", 7, "optimizer steps done", lambda s: integer(s.row.step))
    seq = Column[Shown]("", "seq", 7, "newest collective's number in its group", _sequence, ">", 11 if not stuck else 0)
    last = Column[Shown](
        "", "last collective", 18, "newest collective issued, with its size", _last, "<", 10 if not stuck else 2
    )
    pid = Column[Shown]("", "pid", 8, "process id on its node", lambda s: integer(s.row.pid), ">", 20)
    at = Column[Shown](
        "", "at", 16, "the main thread's innermost line of the job's own code", _at, "<", 1 if stuck else 16, 24
    )
    if stuck:
        return [
            rank, host, gpu, step,
            Column("", "phase", 8, "what the main thread is doing", _phase, "<"),
            Column("waiting", "in phase", 11, "time since it began", _in_phase),
            seq, last, at,
            Column("", "CPU %", 6, _CPU, _cpu, ">", 14),
            pid, state,
        ]  # fmt: skip
    memory = "mem GiB" if not snap.frame or snap.summary.on_device else "rss GiB"
    ms = milliseconds
    wide = screen >= 110  # room for a bar after a number
    # the bar gets its share of the screen before less important columns get anything
    bar_width = max(16, screen * 2 // 5 if wide else screen - 60)
    about_memory = (
        "peak of torch's allocator on the device; without one, the process's RSS;"
        " the bar is the share of the device's, or of the host's, memory"
    )
    about_bar = "the rank's median step, all bars to one scale; waiting for other ranks is apart and last"
    extra: list[Column[Shown]] = []
    if wide:
        number = Column[Shown]("memory", memory, 8 + GAUGE, about_memory, _memory, ">", 2, 0, GAUGE + 1, _memory_parts)
        cpu = Column[Shown]("cpu", "CPU %", 6 + GAUGE, _CPU, _cpu, ">", 6, 0, GAUGE + 1, _cpu_parts)
        if not snap.frame or snap.summary.on_device:
            use = "utilisation of the rank's GPU, newest sample"
            extra = [Column("", "GPU %", 6 + GAUGE, use, _cpu, ">", 5, 0, GAUGE + 1, _gpu_parts)]
    else:
        number = Column[Shown]("memory", memory, 7, about_memory, _memory, ">", 2)
        cpu = Column[Shown]("cpu", "CPU %", 6, _CPU, _cpu, ">", 15)
    bar = Column[Shown](
        "", "one step by phase", bar_width, about_bar, lambda s: "", "<", 1, 400, 0, _bar_parts,
        lambda w: bars.legend(w, colour=ui.drawn),
    )  # fmt: skip
    return [
        rank, host, gpu, step,
        Column("", "step ms", 8, "median time of the last steps", lambda s: ms(s.row.step_ms), ">", 9),
        Column("self_ms", "self ms", 8, "step - wait: the rank's own time; the slow rank waits least", lambda s: ms(s.row.self_ms)),
        Column("delta", "Δ self", 7, "self ms against the (lower) median of the other ranks", _delta),
        Column("wait_ms", "wait ms", 8, "waiting for other ranks in collectives; also part of the phase it happened in", lambda s: ms(s.row.wait_ms)),
        Column("data_ms", "data", 7, "waiting for the next batch", lambda s: ms(s.row.data_ms), ">", 4),
        Column("", "fwd", 6, "forward; includes waiting in collectives that forward calls (DDP buffers, FSDP all-gather)", lambda s: ms(s.row.forward_ms), ">", 11),
        Column("", "bwd", 6, "backward; includes waiting in the gradient all-reduce", lambda s: ms(s.row.backward_ms), ">", 12),
        Column("", "opt", 6, "optimizer step", lambda s: ms(s.row.optimizer_ms), ">", 13),
        Column("", "late", 6, "ms after the first rank at the step's first collective", lambda s: ms(s.row.late_ms), ">", 14),
        Column("", "worst", 5, "number of the last 50 steps in which this rank was the slowest", lambda s: integer(s.row.slowest_in), ">", 10),
        number, *extra, cpu, seq, last, at, pid, state, *([bar] if screen >= BAR_FROM else []),
    ]  # fmt: skip


def all_columns() -> list[Column[Shown]]:
    """Every column of both tables, once: for the help."""
    from pathlib import Path

    snap, ui = Snapshot(Path(".")), Ui()
    both = {c.title: c for stuck in (False, True) for c in columns_for(snap, ui, stuck)}
    return list(both.values())
