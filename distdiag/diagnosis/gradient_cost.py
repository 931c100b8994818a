"""DDP's own timings of its gradients: the share of step time that their communication costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distdiag.diagnosis.comparison import BLOCKS, blocks, half_interval
from distdiag.diagnosis.model.snapshot import Buckets, DdpTime, Snapshot
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.terms.steps import exposed_share

LEAST = 3  # steps after the warm-up that DDP must have timed on all ranks
LEAST_OF_INTERVAL = 2 * BLOCKS


@dataclass(frozen=True)
class Gradients:
    """What DDP's gradients cost, as shares of step time, over the steps that DDP timed."""

    share: float  # exposed communication on the rank with the least: the others also wait for late ranks
    interval: tuple[float, float] | None  # 95 % of what as many later steps would show; None: too few steps
    comm_share: float  # exposed or not, on the same rank
    buckets: Buckets


def gradients(s: Snapshot) -> Gradients | None:
    """Return what DDP has timed; None if that are too few steps of a rank."""
    of_rank = []
    for rank in s.ranks.values():
        times = [x for x in rank.ddp_times if x.step > STEPS.warm_up]
        if len(times) < LEAST or sum(x.step_ms for x in times) <= 0:
            return None
        of_rank.append(times)
    known = [m.buckets for r in s.ranks.values() for m in r.models if m.buckets is not None]
    if not of_rank or not known:
        return None
    least = min(of_rank, key=_share)
    comm = sum(x.comm_ms for x in least) / sum(x.step_ms for x in least)
    return Gradients(_share(least), _interval(least), comm, max(known, key=lambda b: b.bytes))


def _share(times: Sequence[DdpTime]) -> float:
    return exposed_share((x.exposed_ms, x.step_ms) for x in times)


def _interval(times: Sequence[DdpTime]) -> tuple[float, float] | None:
    """Return the 95 % interval of the share in as many later steps, from the shares of a few blocks of steps."""
    n = len(times)
    if n < LEAST_OF_INTERVAL:
        return None
    parts = [times[first:end] for first, end in blocks(n)]
    if any(sum(x.step_ms for x in part) <= 0 for part in parts):
        return None
    half = half_interval([_share(part) for part in parts])
    share = _share(times)
    return max(0.0, share - half), min(1.0, share + half)
