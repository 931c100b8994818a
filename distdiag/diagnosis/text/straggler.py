"""The findings of rule `straggler`: message, sites, advice."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.gain import gain
from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Arrival, RankState, Site, Snapshot
from distdiag.diagnosis.periodic import Periodic
from distdiag.diagnosis.step_times import PHASES, Window, part_ms
from distdiag.diagnosis.text.phrases import at, ordinal, where, where_stack
from distdiag.terms.units import percent

kind = kinds.STRAGGLER
CAUSES = {"data": "data", "forward": "forward", "backward": "backward", "optimizer": "optimizer", "other": "host"}


@dataclass(frozen=True)
class Slow:
    """Ranks that work longest in most steps.

    Attributes:
        count: Steps in which they are the slowest.
        gain_ms: What the others would gain per step if they were not, in ms.
        step_ms: Step time in ms.
    """

    ranks: list[int]
    count: int
    gain_ms: float
    step_ms: float


_ADVICE = {
    "data": "check storage and CPU load for the loader of {who}; use more workers or prefetching",
    "forward": "compare the input sizes of that rank with the others'; if they are equal, check {clocks}what else runs on its host",
    "backward": "compare the input sizes of that rank with the others'; if they are equal, check {clocks}what else runs on its host",
    "optimizer": "look for work in optimizer.step that only that rank does (hooks, logging)",
    "other": "move that work off the training step: do it in fewer steps, on all ranks in turn, or in a thread",
}


def slow_finding(
    s: Snapshot,
    window: Window,
    slow: Slow,
    rank: int,
    phase: str,
    excess_ms: float,
    limit_ms: float | None,
    queued_ms: float,
) -> Finding:
    """Return the finding of ranks that work longest in most steps.

    Args:
        limit_ms: Most milliseconds per step that the job would gain, since something else limits the others, too. None if that is
            not known.
        queued_ms: Milliseconds per step that the rank waited for a CPU beyond the others; not in `excess_ms`.
    """
    r, n = s.ranks[rank], len(window.columns)
    stack = _stack_of(r, phase)
    site: Site | None = stack[0] if stack else None
    rest = tuple(q for q in window.ranks if q not in slow.ranks)
    alone = len(slow.ranks) == 1
    whose, up_to = f"{'its' if alone else 'their'} own code between steps", "" if alone else "up to "
    slower = "slowest" if alone else "slower than all of them"
    others = (
        where(s.ranks[k], "user_code", next(iter(_stack_of(s.ranks[k], phase)), None)) for k in slow.ranks if k != rank
    )
    return Finding(
        kind=kind.name,
        cause=CAUSES[phase],
        certainty=Certainty.SUSPECTED,
        severity=Severity.WARNING,
        culprits=tuple(slow.ranks),
        victims=rest,
        where=(*(where_stack(r, stack, "user_code") if stack else (where(r, "user_code"),)), *others),
        step=r.step,
        message=f"{rank_list(slow.ranks)}: {whose if phase == 'other' else phase} {up_to}+{excess_ms:.0f} ms "
        f"per step against the others{_queued_text(excess_ms, queued_ms)}, {slower} in {slow.count} of the last {n} steps{at(site)}",
        cost=f"{rank_list(rest)} wait{'s' if len(rest) == 1 else ''} {slow.gain_ms:.0f} ms of a step of "
        f"{slow.step_ms:.0f} ms{_gain_text(window, slow, limit_ms)}",
        advice=_advice(s, slow.ranks, phase),
    )


def _queued_text(excess_ms: float, queued_ms: float) -> str:
    """Return what the tables' `self` includes and the excess does not, if that is a tenth of it or more."""
    return f" (and {queued_ms:.0f} ms in which it waits for a CPU)" if queued_ms >= 0.1 * excess_ms else ""


def _gain_text(window: Window, slow: Slow, limit_ms: float | None) -> str:
    """Return `; if rank 1 were as fast as the others, a step would take 22 % less (95 % interval 20 to 25 %)`, or nothing."""
    if limit_ms is not None:
        # The others' queues are full: their workers show how fast their loaders are, their steps do not.
        return f"; with a loader like the others' a step would take at most {percent(limit_ms / slow.step_ms)} less"
    found = gain(window, slow.ranks)
    if found is None or found.low <= 0:
        return ""
    rest = [q for q in window.ranks if q not in slow.ranks]
    others = rank_list(rest) if len(rest) == 1 else "the others"
    interval = f"{percent(max(0.0, found.low)).removesuffix(' %')} to {percent(found.high)}"
    if_equal = f"if {rank_list(slow.ranks)} were as fast as {others}"
    return f"; {if_equal}, a step would take {percent(found.share)} less (95 % interval {interval})"


def stage_finding(s: Snapshot, window: Window, slow: Slow, rank: int, phase: str, excess_ms: float) -> Finding:
    """Return the finding of a pipeline's longest stage."""
    rest = tuple(q for q in window.ranks if q not in slow.ranks)
    return Finding(
        kind=kind.name,
        cause="stage",
        certainty=Certainty.SUSPECTED,
        severity=Severity.INFO,
        culprits=tuple(slow.ranks),
        victims=rest,
        where=(where(s.ranks[rank], "user_code"),),
        step=s.ranks[rank].step,
        message=f"{rank_list(slow.ranks)}: the longest stage, {'its own code' if phase == 'other' else phase} +{excess_ms:.0f} ms "
        f"per step against the others",
        cost=f"{rank_list(rest)} {'is' if len(rest) == 1 else 'are'} idle for {slow.gain_ms:.0f} ms per step because of it: "
        f"{percent(slow.gain_ms / slow.step_ms)} of step time",
        advice=f"if this pipeline is too slow, move layers from {rank_list(slow.ranks)} to the others; more micro-batches "
        "shorten the idle time at the start and end of a step",
    )


def device_finding(
    s: Snapshot, window: Window, slow: RankState, count: int, usual_ms: float, excess_ms: float, step_ms: float
) -> Finding:
    """Return the finding of a rank whose device is slow, not its host."""
    rest = tuple(q for q in window.ranks if q != slow.rank)
    stack = _stack_of(slow, "forward")
    return Finding(
        kind=kind.name,
        cause="forward",
        certainty=Certainty.SUSPECTED,
        severity=Severity.WARNING,
        culprits=(slow.rank,),
        victims=rest,
        where=where_stack(slow, stack, "user_code") if stack else (where(slow, "user_code"),),
        step=slow.step,
        message=f"rank {slow.rank}: forward takes {usual_ms + excess_ms:.0f} ms on its device, {usual_ms:.0f} ms on the others', "
        f"slowest in {count} of the last {len(window.columns)} steps; its host is not late",
        cost=f"{rank_list(rest)} wait{'s' if len(rest) == 1 else ''} at least {excess_ms:.0f} ms per step: "
        f"{percent(excess_ms / step_ms)} of step time",
        advice=f"compare the input sizes of rank {slow.rank} with the others'; if they are equal, check its device: clocks, power "
        "limit, temperature, other processes",
    )


def _advice(s: Snapshot, ranks: list[int], phase: str) -> str:
    if phase == "data" and all(x.workers == 0 for q in ranks for x in s.ranks[q].loaders if x.in_training):
        return "num_workers=0: the dataset's own code runs in the training process; make it faster, or set num_workers"
    return _ADVICE[phase].format(who=rank_list(ranks), clocks="its device clocks and " if s.gpus else "")


def periodic_finding(s: Snapshot, window: Window, found: Periodic, severity: Severity) -> Finding:
    """Return the finding of a rank that is slow in every n-th step, or irregularly."""
    r, n = s.ranks[found.rank], len(window.columns)
    rest = tuple(q for q in window.ranks if q != found.rank)
    steps, slow = window.steps[found.rank], set(found.indices)

    def excess_ms(phase: str) -> float:
        usual = statistics.median(part_ms(x, phase) for i, x in enumerate(steps) if i not in slow)
        return statistics.median(part_ms(steps[i], phase) for i in found.indices) - usual

    phase = max(PHASES, key=excess_ms)
    when, steps_text = (f"every {ordinal(found.period)} step, ", "") if found.period is not None else ("", " steps")
    stack = _stack_of(r, phase)
    return Finding(
        kind=kind.name,
        cause=CAUSES[phase],
        certainty=Certainty.SUSPECTED,
        severity=severity,
        culprits=(found.rank,),
        victims=rest,
        where=where_stack(r, stack, "user_code") if stack else (where(r, "user_code"),),
        step=r.step,
        message=f"rank {found.rank}: {'its own code between steps' if phase == 'other' else phase} +{found.gain_ms:.0f} ms in "
        f"{when}{len(found.indices)} of the last {n}{steps_text}{at(stack[0] if stack else None)}",
        cost=f"{rank_list(rest)} wait{'s' if len(rest) == 1 else ''} {percent(found.cost)} of the time for it",
        advice=_advice(s, [found.rank], phase),
    )


def _stack_of(r: RankState, phase: str) -> tuple[Site, ...]:
    """Return the stack with most samples of that phase; `other` also includes phases that the user named.

    Samples of `init` are from before the first step, so they count only if there are no others.
    """
    names = ("other", "checkpoint", "validate") if phase == "other" else (phase,)
    if phase == "other" and not any(r.phase_sites.get(name) for name in names):
        names = ("init",)
    best: tuple[Site, ...] = ()
    most = 0
    for name in names:
        sites = r.phase_sites.get(name, ())
        if sites and sites[0][1] > most:
            most = sites[0][1]
            best = r.phase_stacks.get(name, (sites[0][0],))
    return best


def rotating_finding(s: Snapshot, window: Window, phase: str, changes: int, skew_ms: float, step_ms: float) -> Finding:
    """Return the finding of a slowest rank that keeps changing."""
    ranks = window.ranks
    return Finding(
        kind=kind.name,
        cause="rotating",
        certainty=Certainty.SUSPECTED,
        severity=Severity.WARNING,
        victims=tuple(ranks),
        where=tuple(where(s.ranks[q], None, (_stack_of(s.ranks[q], phase) or (None,))[0]) for q in ranks),
        step=s.ranks[ranks[0]].step,
        message=f"no single rank is slow: the slowest changed {changes} times in {len(window.columns)} steps, "
        f"skew p50 {skew_ms:.0f} ms, mostly in {'code between steps' if phase == 'other' else phase}",
        cost=f"{percent(skew_ms / step_ms)} of step time is spent waiting for the slowest rank",
        advice="look for work of varying length on all ranks (input sizes, garbage collection, cron), not for one bad node",
    )


def arrival_finding(
    s: Snapshot, r: RankState, recent: list[Arrival], count: int, skew_ms: float, period_ms: float
) -> Finding:
    """Return the finding of a rank that enters its collectives last, in a loop without optimizer steps."""
    stack = max(r.phase_stacks.values(), key=len, default=r.user_stack)
    stack = next((r.phase_stacks[name] for name in ("other", "init") if r.phase_sites.get(name)), stack)
    return Finding(
        kind=kind.name,
        cause="host",
        certainty=Certainty.SUSPECTED,
        severity=Severity.WARNING,
        culprits=(r.rank,),
        victims=tuple(k for k in sorted(s.ranks) if k != r.rank),
        where=where_stack(r, stack) if stack else (where(r),),
        message=f"rank {r.rank} enters {recent[-1].op} last in {count} of the last {len(recent)}, "
        f"{skew_ms:.0f} ms after the first{at(stack[0] if stack else None)}",
        cost=f"the others wait {skew_ms:.0f} ms of every {period_ms:.0f} ms",
        advice=f"look at what rank {r.rank} does between its collectives that the others do not",
    )
