"""What one frame says of all ranks together; computed once per frame, from columns."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field

from distdiag.diagnosis.snapshot import Life
from distdiag.store.frames import RankTable
from distdiag.tui import severity
from distdiag.tui.text import median_low, quantile

Waiting = tuple[str, str, int | None, int | None]  # op, group, seq, bytes


@dataclass(frozen=True)
class Summary:
    """Numbers of the header; None where nobody measured."""

    n: int = 0
    reported: int = 0
    missing: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    finished: int = 0
    nodes: int = 0
    node_of: dict[int, str] = field(default_factory=dict)  # node -> host name
    marks: list[severity.Mark] = field(default_factory=list)
    step: int | None = None  # the furthest rank's
    step_behind: int | None = None  # the last one's
    step_ms: float | None = None  # median over ranks
    self_p50: float | None = None
    self_p99: float | None = None  # only where the sample carries it: 100 ranks and more
    self_max: float | None = None
    wait_p50: float | None = None
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


def _known(values: array) -> list[float]:
    return [v for v in values if v == v and not math.isinf(v)]


def summarise(table: RankTable) -> Summary:
    """The summary of a frame's ranks."""
    n = len(table)
    ranks = table.numbers("rank")
    lives = table.words("life")
    missing = tuple(int(r) for r, life in zip(ranks, lives, strict=True) if life == Life.MISSING)
    gone = (Life.KILLED, Life.CRASHED, Life.SILENT)
    lost = tuple(int(r) for r, life in zip(ranks, lives, strict=True) if life in gone)
    steps = _known(table.numbers("step"))
    own = sorted(_known(table.numbers("self_ms")))
    device = _known(table.numbers("device_bytes"))
    memory = device or _known(table.numbers("rss_bytes"))
    samples = _known(table.numbers("samples_per_s"))
    losses = _known(table.numbers("loss"))
    ops = table.words("waiting_op")
    waiting: Counter[Waiting] = Counter()
    oldest: float | None = None
    if any(ops):
        groups, seqs = table.words("waiting_group"), table.numbers("waiting_seq")
        sizes, ages = table.numbers("waiting_bytes"), table.numbers("waiting_age_s")
        for op, group, seq, size, age in zip(ops, groups, seqs, sizes, ages, strict=True):
            if op:
                waiting[(op, group or "", int(seq) if seq == seq else None, int(size) if size == size else None)] += 1
                if age == age and (oldest is None or age > oldest):
                    oldest = age
    nodes = dict(zip(map(int, table.numbers("node")), table.words("host"), strict=True))
    return Summary(
        n=n,
        reported=n - len(missing),
        missing=missing,
        lost=lost,
        finished=lives.count(Life.FINISHED),
        nodes=len(nodes),
        node_of={k: v or "" for k, v in nodes.items()},
        marks=severity.of_table(table),
        step=int(max(steps)) if steps else None,
        step_behind=int(min(steps)) if steps else None,
        step_ms=median_low(_known(table.numbers("step_ms"))),
        self_p50=quantile(own, 0.5),
        self_p99=quantile(own, 0.99) if len(own) >= 100 else None,
        self_max=own[-1] if own else None,
        wait_p50=median_low(_known(table.numbers("wait_ms"))),
        samples_per_s=sum(samples) if samples else None,
        loss=sum(losses) / len(losses) if losses else None,
        memory_max_bytes=max(memory) if memory else None,
        on_device=bool(device),
        waiting=tuple(waiting.most_common(8)),
        waiting_age_s=oldest,
    )
