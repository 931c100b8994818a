"""What one frame says of all ranks together; computed once per frame, from columns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import Life
from distdiag.store.frames import RankTable
from distdiag.terms.quantiles import median_low, quantile
from distdiag.tui.draw import severity
from distdiag.tui.draw.text import cells, clean

Waiting = tuple[str, str, int | None, int | None]  # op, group, seq, bytes


@dataclass(frozen=True)
class Summary:
    """Numbers of the header; None where nobody measured."""

    n: int = 0
    reported: int = 0
    missing: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    layout: Layout = field(default_factory=lambda: Layout())
    marks: list[severity.Mark] = field(default_factory=list)
    flagged: tuple[int, ...] = ()  # rows of the frame whose mark is not a quiet one
    step: int | None = None  # the furthest rank's
    step_behind: int | None = None  # the last one's
    epoch: int | None = None
    step_ms: float | None = None  # median over ranks
    self_p50: float | None = None
    self_p99: float | None = None  # only where the sample carries it: 100 ranks and more
    self_max: float | None = None
    wait_mean: float | None = None  # over ranks: what the job loses to waiting
    samples_per_s: float | None = None
    loss: float | None = None
    memory_max_bytes: float | None = None
    on_device: bool = False  # memory_max_bytes is of a device, not of the process
    waiting: tuple[tuple[Waiting, int], ...] = ()  # most ranks first
    waiting_age_s: float | None = None

    @property
    def spread(self) -> float | None:
        """(slowest - median) / median of the ranks' own time."""
        if self.self_max is None or not self.self_p50:
            return None
        return (self.self_max - self.self_p50) / self.self_p50


@dataclass(frozen=True)
class Layout:
    """Where the ranks are: the same in every frame of a run, and expensive for thousands of them."""

    key: tuple[bytes, ...] = ()
    ranks: list[int] = field(default_factory=list)  # rank number of each row
    row_of: dict[int, int] = field(default_factory=dict)  # row of each rank
    hosts: dict[int, str] = field(default_factory=dict)  # node -> host name
    nodes: list[int] = field(default_factory=list)  # all nodes, rising
    locals: list[int] = field(default_factory=list)  # all local ranks, rising
    place: list[tuple[int, int]] = field(default_factory=list)  # of each row: index into nodes, index into locals
    host_cells: int = 8  # the longest host name


def layout_of(table: RankTable, before: Layout) -> Layout:
    """Return the layout of a frame; the previous frame's if nothing moved."""
    key = (table.raw("node"), table.raw("local_rank"), table.raw("rank"))
    if key == before.key and before.place:
        return before
    node = [int(v) if v == v else 0 for v in table.numbers("node")]
    local = [int(v) if v == v else 0 for v in table.numbers("local_rank")]
    nodes, locals_ = sorted(set(node)), sorted(set(local))
    column, row = {n: i for i, n in enumerate(nodes)}, {x: i for i, x in enumerate(locals_)}
    hosts = {n: h or "" for n, h in zip(node, table.words("host"), strict=True)}
    ranks = [int(r) for r in table.numbers("rank")]
    places = [(column[n], row[x]) for n, x in zip(node, local, strict=True)]
    longest = max((cells(clean(h.split(".")[0])) for h in hosts.values()), default=8)
    return Layout(key, ranks, {rank: i for i, rank in enumerate(ranks)}, hosts, nodes, locals_, places, longest)


def summarise(table: RankTable, before: Summary) -> Summary:
    """Return the summary of a frame's ranks; `before` is the previous frame's, for what does not change."""
    n = len(table)
    layout = layout_of(table, before.layout)
    missing, lost = _lives(table)
    steps, device = table.known("step"), table.known("device_bytes")
    own = sorted(table.known("self_ms"))
    memory = device or table.known("rss_bytes")
    samples, losses, epochs = table.known("samples_per_s"), table.known("loss"), table.known("epoch")
    waits = table.known("wait_ms")
    waiting, oldest = _waiting(table)
    marks = severity.of_table(table)
    return Summary(
        n=n,
        reported=n - len(missing),
        missing=missing,
        lost=lost,
        layout=layout,
        marks=marks,
        flagged=tuple(i for i, m in enumerate(marks) if m.level),
        step=int(max(steps)) if steps else None,
        step_behind=int(min(steps)) if steps else None,
        epoch=int(max(epochs)) if epochs else None,
        step_ms=median_low(table.known("step_ms")),
        self_p50=quantile(own, 0.5),
        self_p99=quantile(own, 0.99) if len(own) >= 100 else None,
        self_max=own[-1] if own else None,
        wait_mean=sum(waits) / len(waits) if waits else None,
        samples_per_s=sum(samples) if samples else None,
        loss=sum(losses) / len(losses) if losses else None,
        memory_max_bytes=max(memory) if memory else None,
        on_device=bool(device),
        waiting=waiting,
        waiting_age_s=oldest,
    )


def _lives(table: RankTable) -> tuple[tuple[int, ...], tuple[int, ...]]:
    words, codes = table.coded("life")
    if len(words) == 1 and words[0] not in (Life.MISSING, *severity.GONE):
        return (), ()
    ranks, lives = table.numbers("rank"), [words[c] for c in codes]
    missing = tuple(int(r) for r, life in zip(ranks, lives, strict=True) if life == Life.MISSING)
    lost = tuple(int(r) for r, life in zip(ranks, lives, strict=True) if life in severity.GONE)
    return missing, lost


def _waiting(table: RankTable) -> tuple[tuple[tuple[Waiting, int], ...], float | None]:
    """Return what ranks wait in, most ranks first, and how long the first of them has waited."""
    if table.coded("waiting_op")[0] == [None]:
        return (), None
    counts: Counter[Waiting] = Counter()
    oldest: float | None = None
    ops, groups, seqs = table.words("waiting_op"), table.words("waiting_group"), table.numbers("waiting_seq")
    sizes, ages = table.numbers("waiting_bytes"), table.numbers("waiting_age_s")
    for op, group, seq, size, age in zip(ops, groups, seqs, sizes, ages, strict=True):
        if op:
            counts[(op, group or "", int(seq) if seq == seq else None, int(size) if size == size else None)] += 1
            if age == age and (oldest is None or age > oldest):
                oldest = age
    return tuple(counts.most_common(8)), oldest
