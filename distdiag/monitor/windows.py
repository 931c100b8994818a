"""What the screens show of a rank's last steps: medians, throughput, loss. Each node computes it for its own ranks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import msgspec

from distdiag.diagnosis.model.snapshot import RankState, Step
from distdiag.monitor.fields import names
from distdiag.store.frames import RankRow
from distdiag.terms.steps import throughput

WINDOW = 50  # steps


class Window(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Of a rank's last steps: medians in ms, and the fields of `RankRow` with these names."""

    self_ms: float | None = None
    step_ms: float | None = None
    wait_ms: float | None = None
    data_ms: float | None = None
    h2d_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    other_ms: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None


_TIMES = tuple(name for name in names(Window, Step) if name.endswith("_ms"))
_times = attrgetter(*_TIMES)
assert set(Window.__struct_fields__) <= set(RankRow.__struct_fields__)


def _median(values: Sequence[float]) -> float | None:
    # written out: `statistics.median` doubles the time of a frame of thousands of ranks
    if not values:
        return None
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def window_of(steps: Sequence[Step]) -> Window:
    if not steps:
        return Window()
    columns = zip(*map(_times, steps), strict=True)
    medians = {
        name: _median([v for v in column if v is not None] if None in column else column)
        for name, column in zip(_TIMES, columns, strict=True)
    }
    timed = [x for x in steps if x.step > 1] or steps
    return Window(
        self_ms=_median([ms if (ms := x.step_ms - x.wait_ms) > 0.0 else 0.0 for x in steps]),
        samples_per_s=throughput(sum([x.samples for x in timed]), sum([x.step_ms for x in timed]) / 1e3),
        loss=steps[-1].loss,
        **medians,
    )


class Windows:
    """The windows of all ranks; those of this node are computed if their steps have changed, the others are taken as sent."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[Sequence[Step], Window]] = {}  # by rank: its last steps, and what was made of them
        self._sent: dict[int, Window] = {}

    def take(self, sent: dict[int, Window]) -> None:
        self._sent |= sent

    def of(self, r: RankState) -> Window:
        """Return the window of a rank; of one without steps, as of a node that is not heard of, it is empty."""
        sent = self._sent.get(r.rank)
        if sent is not None:
            return sent if r.steps else Window()
        steps = r.steps[-WINDOW:]
        known, window = self._own.get(r.rank, ((), Window()))
        if len(known) != len(steps) or (steps and (known[0] is not steps[0] or known[-1] is not steps[-1])):
            window = window_of(steps)
            self._own[r.rank] = steps, window
        return window
