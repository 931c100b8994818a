"""The tables of the home screen: times while the job runs, sites while it is stuck; and one row per node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from distdiag.store.frames import RankRow
from distdiag.terms.quantiles import median_low
from distdiag.tui.data.order import ordered
from distdiag.tui.data.ranks_data import Capacity
from distdiag.tui.data.snapshot import Snapshot
from distdiag.tui.draw import bars, severity
from distdiag.tui.draw.lines import Line, Part
from distdiag.tui.draw.severity import Mark
from distdiag.tui.draw.table import Cell, Column, choose, header, row
from distdiag.tui.draw.text import (
    MISSING,
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
from distdiag.tui.screens.page import Sheet, lead
from distdiag.tui.ui import Ui

GAUGE = 6  # cells of a small bar after a number
WARN_PCT, ERROR_PCT = 5.0, 20.0  # of the step time, from which on a rank's Δ self is coloured


@dataclass(frozen=True)
class Shown:
    """One row: the rank, its mark, and what the cells need around it."""

    row: RankRow
    mark: severity.Mark
    snap: Snapshot
    ui: Ui
    stuck: bool
    capacity: Capacity
    scale_ms: float  # the longest step of all ranks: the width of every bar


def _delta(s: Shown) -> Cell:
    d, step = s.row.delta_self_ms, s.row.step_ms
    if d is None or not step:
        return delta(d)
    share = 100 * d / step
    style = "error" if share >= ERROR_PCT else "warning" if share >= WARN_PCT else ""
    return delta(d), style


def _last(s: Shown) -> Cell:
    op, nbytes = (s.row.waiting_op, s.row.waiting_bytes) if s.row.waiting_op else (s.row.last_op, s.row.last_bytes)
    return f"{clean(op)} {short_size(nbytes)}".rstrip() if op else MISSING


def _sequence(s: Shown) -> Cell:
    return integer(s.row.waiting_seq if s.row.waiting_op and s.row.waiting_seq is not None else s.row.last_seq)


def _phase(s: Shown) -> Cell:
    return "comm" if s.row.waiting_op else clean(s.row.phase or MISSING)


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
    """Return a number followed by a small bar of the share; the bar is hot from `hot` on."""
    style = "hot" if share is not None and share >= hot else "fill"
    return [
        (fit(text, width - GAUGE - 1, ">") + " ", "", ""),
        *bars.gauge(share, GAUGE, colour=s.ui.drawn, style=style),
    ]


def _memory_parts(s: Shown, width: int) -> list[Part]:
    on_device = s.row.device_bytes is not None
    used = s.row.device_bytes if on_device else s.row.rss_bytes
    total = getattr(s.capacity.gpu if on_device else s.capacity.host, "memory_total_bytes", None)
    return _with_gauge(s, width, gib(used), _share(used, total), 0.95)


def _pct_parts(of: Callable[[Shown], float | None]) -> Callable[[Shown, int], list[Part]]:
    return lambda s, width: _with_gauge(s, width, decimal(of(s), 0), _share(of(s), 100))


def _bar_parts(s: Shown, width: int) -> list[Part]:
    if not s.row.step_ms:
        return [(fit(MISSING, width), "muted", "")]
    # a word in every bar is noise: the legend is in the head
    words = s.mark.level >= severity.WARN.level
    return bars.stacked(bars.phases_of(s.row), s.scale_ms, width, colour=s.ui.drawn, words=words)


def _at(s: Shown) -> Cell:
    text = place(s.row.file, s.row.line, s.row.function).replace(" in ", " ", 1)
    return (text, s.mark.style) if s.mark.level >= severity.WARN.level else text


def host_width(snap: Snapshot) -> int:
    """Return the cells of the node column: as wide as the longest host name, from 8 to 20."""
    return max(8, min(20, snap.summary.layout.host_cells))


def short_host(host: str) -> str:
    """Return the host without its domain; an address stays whole."""
    return clean(host if host.replace(".", "").isdigit() else host.split(".")[0]) or MISSING


_C = Column[Shown]
_RANK = _C("rank", "rank", 4, "global rank", lambda s: str(s.row.rank))
_NODE = _C("node", "node", 8, "host the rank runs on", lambda s: short_host(s.row.host), "<")
_GPU = _C("", "gpu", 3, "index of the rank's device on its node", lambda s: integer(s.row.gpu), ">", 13)
_STEP = _C("step", "step", 7, "optimizer steps done", lambda s: integer(s.row.step))
_SEQ = _C("", "seq", 7, "newest collective's number in its group", _sequence, ">", 11)
_LAST = _C("", "last collective", 18, "newest collective issued, with its size", _last, "<", 10)
_PID = _C("", "pid", 8, "process id on its node", lambda s: integer(s.row.pid), ">", 20)
_AT = _C("", "at", 16, "the main thread's innermost line of the job's own code", _at, "<", 16, 24)
_STATE = _C("", "state", 8, "worst open finding that names the rank, or what happened to its process",
            lambda s: severity.state_of(s.row, s.mark, s.stuck), "<", 0, 6)  # fmt: skip
_MEMORY = _C("memory", "mem GiB", 7, "peak of torch's allocator on the device; without one, the process's RSS; the bar is the share of "
             "the device's, or of the host's, memory", _memory, ">", 2)  # fmt: skip
_GPU_USE = _C("", "GPU %", 6 + GAUGE, "utilisation of the rank's GPU, newest sample", _cpu, ">", 5, 0, GAUGE + 1,
              _pct_parts(lambda s: getattr(s.capacity.gpu, "utilization_pct", None)))  # fmt: skip
_BAR = _C("", "one step by phase", 16, "the rank's median step, all bars to one scale; waiting for other ranks is apart and last",
          lambda s: "", "<", 1, 400, 0, _bar_parts)  # fmt: skip

# The tables of a stuck and of a running job. What depends on the screen or the job is set in `columns_for`.
_STUCK = (
    _RANK, _NODE, _GPU, _STEP,
    _C("", "phase", 8, "what the main thread is doing", _phase, "<"),
    _C("waiting", "in phase", 11, "time since it began", _in_phase),
    replace(_SEQ, priority=0), replace(_LAST, priority=2), replace(_AT, priority=1),
    _C("", "CPU %", 6, _CPU, _cpu, ">", 14),
    _PID, _STATE,
)  # fmt: skip
_RUNNING = (
    _RANK, _NODE, _GPU, _STEP,
    _C("", "step ms", 8, "median time of the last steps", lambda s: milliseconds(s.row.step_ms), ">", 9),
    _C("self_ms", "self ms", 8, "step - wait: the rank's own time; the slow rank waits least", lambda s: milliseconds(s.row.self_ms)),
    _C("delta", "Δ self", 7, "self ms against the (lower) median of the other ranks", _delta),
    _C("wait_ms", "wait ms", 8, "waiting for other ranks in collectives; also part of the phase it happened in", lambda s: milliseconds(s.row.wait_ms)),
    _C("data_ms", "data", 7, "waiting for the next batch", lambda s: milliseconds(s.row.data_ms), ">", 4),
    _C("", "fwd", 6, "forward; includes waiting in collectives that forward calls (DDP buffers, FSDP all-gather)", lambda s: milliseconds(s.row.forward_ms), ">", 11),
    _C("", "bwd", 6, "backward; includes waiting in the gradient all-reduce", lambda s: milliseconds(s.row.backward_ms), ">", 12),
    _C("", "opt", 6, "optimizer step", lambda s: milliseconds(s.row.optimizer_ms), ">", 13),
    _C("", "late", 6, "ms after the first rank at the step's first collective", lambda s: milliseconds(s.row.late_ms), ">", 14),
    _C("", "worst", 5, "number of the last 50 steps in which this rank was the slowest", lambda s: integer(s.row.slowest_in), ">", 10),
    _MEMORY, _GPU_USE,
    _C("cpu", "CPU %", 6, _CPU, _cpu, ">", 15),
    _SEQ, _LAST, _AT, _PID, _STATE, _BAR,
)  # fmt: skip
_NARROW, _WIDE = 72, 110  # cells of a screen with room for the bar of each row; also for a bar after a number


def columns_for(snap: Snapshot, ui: Ui, stuck: bool, screen: int = 200) -> list[Column[Shown]]:
    """Return the columns of the table in this state, for a screen of this width; `choose` takes those that fit."""
    s = snap.summary
    digits, one_node = len(str(max(s.n - 1, 0))), len(s.layout.nodes) <= 1
    return _columns(stuck, screen, not snap.frame or s.on_device, digits, host_width(snap), one_node, ui.drawn)


@lru_cache(maxsize=16)
def _columns(
    stuck: bool, screen: int, on_device: bool, digits: int, host: int, one_node: bool, drawn: bool
) -> list[Column[Shown]]:
    """Return the columns; made once, as they are the same in nearly every frame."""
    wide = screen >= _WIDE
    change: dict[str, dict[str, Any]] = {
        "rank": {"width": max(4, digits + 1)},
        "node": {"width": host, "priority": 3 if one_node else 0},
    }
    if not stuck:
        change["mem GiB"] = {"title": "mem GiB" if on_device else "rss GiB"}
        # the bar gets its share of the screen before less important columns get anything
        change["one step by phase"] = {
            "width": max(16, screen * 2 // 5 if wide else screen - 60),
            "head": lambda w: bars.legend(w, colour=drawn),
        }
        if wide:
            cpu = _pct_parts(lambda s: s.row.cpu_pct)
            change["mem GiB"] |= {"width": 8 + GAUGE, "tail": GAUGE + 1, "parts": _memory_parts}
            change["CPU %"] = {"width": 6 + GAUGE, "priority": 6, "tail": GAUGE + 1, "parts": cpu}
    hidden = {"GPU %" if not (wide and on_device) else "", "one step by phase" if screen < _NARROW else ""}
    return [replace(c, **change.get(c.title, {})) for c in (_STUCK if stuck else _RUNNING) if c.title not in hidden]


def all_columns() -> list[Column[Shown]]:
    """Return every column of both tables once, for the help."""
    from pathlib import Path

    snap, ui = Snapshot(Path(".")), Ui()
    both = {c.title: c for stuck in (False, True) for c in columns_for(snap, ui, stuck)}
    return list(both.values())


@dataclass(frozen=True)
class NodeGroup:
    node: int
    host: str
    ranks: int
    flagged: int
    worst: int  # rank with the worst mark, then the largest Δ self
    mark: Mark
    values: dict[str, list[float]]  # by column: what is known of its ranks

    def median(self, column: str) -> float | None:
        return median_low(self.values[column])


_VALUES = ("self_ms", "delta_self_ms", "wait_ms", "data_ms", "device_bytes", "rss_bytes", "step")


def groups(snap: Snapshot, ui: Ui) -> list[NodeGroup]:
    """Return one entry per node with ranks that pass the filter; worst nodes first, then by node."""
    if snap.frame is None:
        return []
    table, marks = snap.frame.table, snap.summary.marks
    nodes, ranks, hosts = table.numbers("node"), table.numbers("rank"), table.words("host")
    members: dict[int, list[int]] = {}
    for i in ordered(snap, Ui(filter=ui.filter)):  # worst first within each node
        members.setdefault(int(nodes[i]) if nodes[i] == nodes[i] else 0, []).append(i)
    out = []
    for node, rows in members.items():
        values = {name: [v for v in map(table.numbers(name).__getitem__, rows) if v == v] for name in _VALUES}
        worst = max((marks[i] for i in rows), key=lambda m: m.level)
        flagged = sum(marks[i].level > 1 for i in rows)
        out.append(NodeGroup(node, hosts[rows[0]] or "", len(rows), flagged, int(ranks[rows[0]]), worst, values))
    out.sort(key=lambda g: (-g.mark.level, g.node), reverse=ui.reverse)
    return out


_N = Column[NodeGroup]
_COLUMNS = (
    _N("", "ranks", 6, "ranks on it", lambda g: str(g.ranks)),
    _N("", "finding", 7, "ranks with an open finding", lambda g: str(g.flagged) if g.flagged else "·"),
    _N("", "step", 7, "of the rank that is furthest behind", lambda g: integer(min(g.values["step"], default=None))),
    _N("", "self ms", 8, "median of its ranks", lambda g: milliseconds(g.median("self_ms"))),
    _N("", "max Δ", 7, "largest Δ self among its ranks", lambda g: delta(max(g.values["delta_self_ms"], default=None))),
    _N("", "wait ms", 8, "median of its ranks", lambda g: milliseconds(g.median("wait_ms"))),
    _N("", "data", 7, "median of its ranks", lambda g: milliseconds(g.median("data_ms")), ">", 1),
    _N("", "mem GiB", 7, "largest of its ranks", lambda g: gib(max(g.values["device_bytes"] or g.values["rss_bytes"], default=None)), ">", 2),
    _N("", "worst", 6, "its worst rank", lambda g: str(g.worst), ">", 1),
    _N("", "state", 6, "worst severity", lambda g: (g.mark.word, g.mark.style), "<", 0),
)  # fmt: skip


def list_groups(sheet: Sheet, snap: Snapshot, ui: Ui, room: int) -> None:
    found = {g.node: g for g in groups(snap, ui)}
    host = _N("node", "node", host_width(snap), "host", lambda g: short_host(g.host), "<")
    chosen = choose([host, *_COLUMNS], sheet.width, lead=2)
    sheet.add(header(chosen, 2))

    def rows(nodes: Sequence[int]) -> Iterator[Line]:
        return (row(chosen, found[n], lead(found[n].mark, f"node:{n}"), hit=f"node:{n}") for n in nodes)

    space = room - 1 if len(found) <= room - 1 else room - 2
    sheet.list(ui, "ranks", list(found), space, rows, "   nodes")
