"""Collectives that the script itself calls: the line that costs all ranks most, and what to do about it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from distdiag.diagnosis.model.snapshot import Call, Site, Snapshot
from distdiag.diagnosis.model.syntax import Source, line_at
from distdiag.diagnosis.text.phrases import site_text
from distdiag.terms.operations import op_name
from distdiag.terms.units import percent, size_text

LEAST = 8  # complete calls of a line on every rank


@dataclass(frozen=True)
class Limits:
    small_bytes: int = 1 << 16
    """Mean bytes of a call below which its latency matters more than its bytes."""
    several: float = 2.5
    """Calls of a line per step from which on they are worth being put together."""


limits = Limits()
AGAIN = "leave the second out: DDP has averaged the gradients in backward, and a sum of the averages is as many times too large as there are ranks"


@dataclass(frozen=True)
class Line:
    """What the calls of one line cost, on the rank that loses least to them."""

    op: str
    site: Site
    share: float  # of the time, in calls that the host waits for
    per_step: float  # calls; 0: not known
    mean_bytes: int
    source: str = field(default="", compare=False)  # the text of the line
    again: bool = False  # it reduces as much as DDP has averaged already

    @property
    def text(self) -> str:
        often = f", {self.per_step:.0f} times a step" if self.per_step >= limits.several else ""
        size = f" of {size_text(self.mean_bytes)}" if self.mean_bytes else ""
        again = ", which reduces as many elements as DDP has averaged already" if self.again else ""
        return f"{self.op}{size} at {site_text(self.site)}{often}{again}, takes {percent(self.share)}"

    @property
    def advice(self) -> str:
        return next(advice for holds, advice in _ADVICE if holds(self))


def dearest(s: Snapshot, source: Source, again: Site | None) -> Line | None:
    """Return the line whose synchronous calls cost most of every rank's time; None if none is known of all ranks.

    Args:
        again: Where the script reduces what DDP has averaged.
    """
    of_ranks = [_lines(r.calls) for r in s.ranks.values()]
    common = set.intersection(*(set(x) for x in of_ranks)) if of_ranks else set()
    if not common:
        return None
    key = max(common, key=lambda k: min(lines[k][0] for lines in of_ranks))
    share, calls = min((lines[key] for lines in of_ranks), key=lambda x: x[0])
    op, site = calls[-1].op, calls[-1].site
    assert site is not None
    per_step = min(r.sites.get(site.key, 0) / max(r.step, 1) for r in s.ranks.values())
    mean_bytes = int(statistics.mean(c.bytes or 0 for c in calls))
    return Line(
        op_name(op),
        site,
        share,
        per_step,
        mean_bytes,
        line_at(site, source),
        again is not None and again.key == site.key,
    )


def _lines(calls: tuple[Call, ...]) -> dict[tuple[str, str], tuple[float, list[Call]]]:
    """Return of each line (operation, site) that a rank has called often enough: the share of the time that it waits in it, and its calls."""
    done = [c for c in calls if c.entered_s is not None and c.completed_s is not None and not c.on_device]
    if len(done) < LEAST:
        return {}
    span_s = max(c.completed_s or 0.0 for c in done) - min(c.entered_s or 0.0 for c in done)
    of: dict[tuple[str, str], list[Call]] = {}
    for c in done:
        if c.site is not None and not c.asynchronous:
            of.setdefault((c.op, c.site.key), []).append(c)
    return {
        key: (sum((c.completed_s or 0.0) - (c.entered_s or 0.0) for c in mine) / span_s, mine)
        for key, mine in of.items() if len(mine) >= LEAST and span_s > 0
    }  # fmt: skip


_ADVICE: tuple[tuple[Callable[[Line], bool], str], ...] = (
    (lambda x: x.again, AGAIN),
    (lambda x: x.op == "barrier",
     "leave the barrier out of the loop: a collective that follows waits for all ranks by itself"),
    (lambda x: "_object" in x.source,
     "exchange tensors instead of pickled objects (all_gather_into_tensor of numbers, padded to one size), and less often"),
    (lambda x: x.mean_bytes < limits.small_bytes and x.per_step >= limits.several,
     "put the tensors of a step into one and reduce that in one call: small calls cost their latency, not their bytes"),
    (lambda x: x.mean_bytes < limits.small_bytes,
     "add up on each rank, and call it every n-th step only"),
    (lambda x: True,
     "call it less often, send less (a lower precision, what has changed), or start it with `async_op=True` and compute until `wait()`"),
)  # fmt: skip
