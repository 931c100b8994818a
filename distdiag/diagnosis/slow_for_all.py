"""What makes all ranks slow, so that none waits for another: garbage collections, a tool that stays on, steps that take longer with time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Finding, Severity
from distdiag.diagnosis.model.snapshot import WARM_STEPS, RankState, Site, Snapshot
from distdiag.diagnosis.model.syntax import Source, line_at
from distdiag.diagnosis.slow_because import limits as grown
from distdiag.diagnosis.slow_case import limits
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.diagnosis.step_times import PHASES, mean_step_s, part_ms
from distdiag.diagnosis.text import straggler as text
from distdiag.diagnosis.text.phrases import at, wheres

# the newest steps' time, in multiples of the mean so far: steps that grow steadily to twice their first time come to 1.33
GROWS = 1.25
SCHEDULED = "torch.profiler"  # a tool that is on for some steps only, by intent


def found(facts: Facts, collecting: bool) -> Iterator[Finding]:
    """Yield what makes all ranks slow.

    Args:
        collecting: Garbage collections are known already, as pauses of ranks in turn.
    """
    s = facts.snapshot
    if len(s.ranks) < max(1, s.world_size):
        return
    if not collecting:
        yield from _collecting(facts)
    yield from _tools(s)
    yield from _growing(s)


def _tools(s: Snapshot) -> Iterator[Finding]:
    """Yield the tools that are on in all ranks."""
    step = min(r.step for r in s.ranks.values())
    tools = set.intersection(*(set(r.tools) for r in s.ranks.values())) - {SCHEDULED}
    if tools and step > STEPS.settled:
        yield text.TOOLS_ON(victims=sorted(s.ranks), step=step, tools=" and ".join(sorted(tools)))


def _growing(s: Snapshot) -> Iterator[Finding]:
    """Yield steps that take longer with time on all ranks, with the phase that is most of one now."""
    if not all(map(_grows, s.ranks.values())):
        return
    slowest = max(s.ranks.values(), key=_now_ms)
    newest = slowest.steps[-grown.newest :]
    phase_ms, phase = max((statistics.median(part_ms(x, p) for x in newest), p) for p in PHASES)
    sites = {q: next(iter(text.stack_of(r, phase)), None) for q, r in s.ranks.items()}
    yield text.GROWING(
        victims=sorted(s.ranks), step=slowest.step, where=wheres(s, s.ranks, "user_code", sites), site=sites[slowest.rank],
        now_ms=_now_ms(slowest), mean_ms=(mean_step_s(slowest) or 0.0) * 1e3, phase_ms=phase_ms,
        phase="the code between steps" if phase == "other" else phase,
    )  # fmt: skip


def _now_ms(r: RankState) -> float:
    return statistics.median(x.step_ms for x in r.steps[-grown.newest :])


def _grows(r: RankState) -> bool:
    """True if a rank's newest steps take longer than those before them, and than its steps did on average."""
    mean_s = mean_step_s(r)
    if mean_s is None or r.step - WARM_STEPS < 2 * grown.newest or len(r.steps) < 2 * grown.newest:
        return False
    before_ms = statistics.median(x.step_ms for x in r.steps[-2 * grown.newest : -grown.newest])
    return _now_ms(r) > before_ms and _now_ms(r) >= GROWS * mean_s * 1e3


def _collecting(facts: Facts) -> Iterator[Finding]:
    """Yield the full garbage collections that take much of the time of all ranks, whether together or not."""
    s, pauses = facts.snapshot, facts.pauses
    if not pauses.gc_before:
        return
    each = {q: pauses.collecting(s, q) for q in s.ranks}
    least = min(each, key=lambda q: each[q][0])
    share, n = each[least]
    taken_s = s.ranks[least].gc_s - pauses.gc_before[least][1] if least in pauses.gc_before else 0.0
    if n < limits.pauses or share < limits.pauses_share or taken_s * 1e3 < limits.pauses_ms:
        return
    site = _collects(s.ranks[least], share, facts.source)
    yield text.COLLECTING(
        victims=sorted(s.ranks), step=s.ranks[least].step, share=share, n=n, each_s=taken_s / n, site=site,
        where=() if site is None else wheres(s, s.ranks, "user_code", dict.fromkeys(s.ranks, site)),
        by_hand=f", by `gc.collect()`{at(site)}" if site is not None else "", do=text.DO_COLLECT["by itself" if site is None else "by hand"],
        severity=Severity.WARNING if s.ranks[least].step > STEPS.settled else Severity.INFO,
    )  # fmt: skip


def _collects(r: RankState, share: float, source: Source) -> Site | None:
    """Return the line that calls `gc.collect()`, if the rank is seen there in most of the time that its collections take."""
    seen = [x for phase, sites in r.phase_sites.items() if phase != "init" for x in sites]
    at_call = [(n, site) for site, n in seen if "gc.collect(" in line_at(site, source)]
    often = sum(n for n, _ in at_call) >= share / 2 * sum(n for _, n in seen)
    return max(at_call, key=lambda x: x[0])[1] if at_call and often else None
