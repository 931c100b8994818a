"""comm_bound: every rank loses this share of its time to communication that is not hidden behind computing.

If one rank is late the waiting is its doing: that is a straggler.

Faulty jobs: wide_sync. Healthy look-alikes: overlap_async.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.diagnosis.step_times import share_of_all
from distdiag.diagnosis.text.phrases import percent

kind = kinds.COMM_BOUND


@dataclass(frozen=True)
class Limits:
    share: float = 0.3
    """Share of the time that the rank which waits least must lose."""
    least_span_ms: float = 1000.0
    """Milliseconds that the collectives of a loop without optimizer steps must cover."""


limits = Limits()


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the share of time that all ranks lose to communication."""
    window = facts.window
    if isinstance(window, Abstained):
        late = any(f.kind == kinds.STRAGGLER.name for f in facts.found)
        share = 0.0 if late else _shared_waits(facts.snapshot)
        yield _finding(sorted(facts.snapshot.ranks), share, "the time") if share >= limits.share else window
    elif window.inferred:
        yield Abstained("communication lies on the device, and nothing measures it")
    elif facts.shadows:
        yield Abstained(f"{rank_list(facts.shadows)} only shadow the collectives of the others", checked=True)
    elif share := share_of_all(window, lambda x: x.wait_ms, limits.share):
        yield _finding(window.ranks, share, "step time")


def _shared_waits(s: Snapshot) -> float:
    """Return the share of time that every rank's host waits in the collectives of all ranks, in a loop without an optimizer."""
    whole = {name for name, g in s.groups.items() if len(g.ranks) == s.world_size}
    recent = [a for a in s.arrivals if a.group in whole]
    if len(recent) < STEPS.least or s.world_size < 2:
        return 0.0
    span_ms = (recent[-1].t_s - recent[0].t_s) * 1e3
    return min(sum(a.shared_ms for a in recent[:-1]) / span_ms, 1.0) if span_ms > limits.least_span_ms else 0.0


def _finding(ranks: list[int], share: float, of: str) -> Finding:
    return Finding(
        kind=kind.name,
        certainty=Certainty.SUSPECTED,
        severity=Severity.INFO,
        victims=tuple(ranks),
        message=f"exposed communication: at least {percent(share)} of {of} on every rank, with no rank late",
        cost=f"{percent(share)} of {of}",
        advice="`distdiag probe allreduce` measures what this machine can do; synchronise less often, or in larger pieces",
    )
