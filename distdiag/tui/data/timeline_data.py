"""What the timeline shows: the steps of the ranks on the screen in a span of time, and the collectives in it."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.terms.steps import PHASES
from distdiag.tui.data import step_window
from distdiag.tui.data.snapshot import Request

ROWS = 4000  # steps of ranks in one picture: it shows fewer seconds where there are more
COLLECTIVES = 400
Step = namedtuple("Step", ("t_end_s", "step_ms", "wait_ms", *(f"{p}_ms" for p in PHASES)))


@dataclass(frozen=True)
class TimelineData:
    begin_s: float = 0.0
    end_s: float = 0.0
    steps: dict[int, list[Step]] = field(default_factory=dict)  # by rank, rising
    collectives: tuple[tuple[float, float, float], ...] = ()  # first arrival, last arrival, end
    first_s: float = 0.0  # end of the run's first step


def read(run: Run, request: Request, frame: Frame, cache: dict[Any, Any]) -> TimelineData:
    """Steps that overlap the span; those read before are kept."""
    end = min(frame.t_s, request.until) if request.until is not None else frame.t_s
    begin = end - request.span
    if request.extra and (ended := run.query("SELECT max(t_end_s) FROM step WHERE t_end_s <= ?", (end,))[0][0]):
        # the last steps stay on the screen after the job has stopped, in a fifth of it at least
        begin = min(begin, ended - max(request.span, (end - ended) / 4)) if ended < begin else begin
    steps: dict[int, list[Step]] = {rank: [] for rank in request.ranks}
    before, until = run.step_range(begin), run.step_range(frame.t_s)
    first_s = 0.0
    if until is not None:
        last = until[1]
        first = max(until[0] if before is None else before[1], last - ROWS // max(1, len(request.ranks)))
        found = step_window.read(run, cache, "timeline", Step._fields, sorted(request.ranks), (first, last, 1), last)
        for _, by_rank in sorted(found.items()):
            for rank, values in by_rank.items():
                if values[0] is not None and values[0] > begin:
                    steps[rank].append(Step._make(values))
        if "timeline_first" not in cache:
            cache["timeline_first"] = run.query("SELECT min(t_end_s) FROM step WHERE step = ?", (until[0],))[0][0]
        first_s = cache["timeline_first"] or 0.0
    return TimelineData(begin, end, steps, _collectives(run, begin, end), first_s)


def _collectives(run: Run, begin_s: float, end_s: float) -> tuple[tuple[float, float, float], ...]:
    """Return when the first and the last rank arrived at each collective of a span, and when it ended; newest first."""
    found = run.query(
        "SELECT t_s, skew_us, duration_us FROM collective WHERE t_s BETWEEN ? AND ? AND skew_us IS NOT NULL"
        " ORDER BY t_s DESC LIMIT ?",
        (begin_s, end_s, COLLECTIVES),
    )
    return tuple((t, t + (skew or 0) / 1e6, t + ((skew or 0) + (took or 0)) / 1e6) for t, skew, took in found)
