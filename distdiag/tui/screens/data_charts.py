"""The Data screen's charts: how long a rank and the others waited for data in the last steps."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.store.frames import Frame
from distdiag.store.reader import Run
from distdiag.tui.data.history import RANKS
from distdiag.tui.draw.charts import Chart, Curve, grid
from distdiag.tui.draw.lines import Line, line
from distdiag.tui.draw.text import median_low, milliseconds, percent

STEPS = 200
_WAITED = "SELECT step, rank, t_end_s, data_ms, step_ms FROM step WHERE step > ? AND step <= ? AND rank IN ({})"


@dataclass(frozen=True)
class Waited:
    """Waiting for data of one rank, and the median of up to eight others, in the same steps."""

    rank: int
    times: tuple[float, ...] = ()
    own_ms: tuple[float | None, ...] = ()
    share_pct: tuple[float | None, ...] = ()  # of the rank's step time
    others_ms: tuple[float | None, ...] = ()


def read(run: Run, frame: Frame, rank: int, at_s: float | None) -> Waited:
    """Read the last steps, up to a moment."""
    span = run.step_range(at_s)
    if span is None:
        return Waited(rank)
    every = [int(r) for r in frame.table.numbers("rank") if r != rank]
    sample = every if len(every) <= RANKS else every[:: len(every) // RANKS][:RANKS]
    wanted = (rank, *sample)
    rows = run.query(_WAITED.format(",".join("?" * len(wanted))), (span[1] - STEPS, span[1], *wanted))
    own = {step: (t, data, ms) for step, r, t, data, ms in rows if r == rank and t is not None}
    others: dict[int, list[float]] = {}
    for step, r, _, data, _ in rows:
        if r != rank and data is not None:
            others.setdefault(step, []).append(data)
    steps = sorted(own, key=lambda s: own[s][0])
    return Waited(
        rank,
        tuple(own[s][0] for s in steps),
        tuple(own[s][1] for s in steps),
        tuple(100 * d / ms if d is not None and ms else None for _, d, ms in map(own.__getitem__, steps)),
        tuple(median_low(others.get(s, [])) for s in steps),
    )


def lines(
    waited: Waited, width: int, height: int, marks: tuple[tuple[float, str], ...], ascii_only: bool
) -> list[Line]:
    """Return a line that names the rank, and its charts; empty if they do not fit."""
    times = waited.times
    if len(times) < 2:
        return []
    own = Curve(f"rank {waited.rank}", times, waited.own_ms, "accent")
    others = Curve("others", times, waited.others_ms, "area-data")
    curves = (others, own) if any(v is not None for v in waited.others_ms) else (own,)
    charts = [
        Chart("waiting for data", "ms", curves, milliseconds, marks=marks,
              help="waiting for the next batch, of the rank under the cursor and the median of the others"),
        Chart("waiting for data", "of step time", (Curve("", times, waited.share_pct, "area-hot", not ascii_only),), percent,
              marks=marks, help="share of the step that the rank under the cursor waits for its batch"),
    ]  # fmt: skip
    made = grid(charts, times[0], times[-1], width - 1, height - 1, ascii_only)
    name = line((f" rank {waited.rank}", "bold"), (f"   last {len(times)} steps", "muted"))
    return [name, *made] if made else []
