"""Why ranks are slow: garbage collections, a tool that is on, another of its threads, more data, or something that grows.

What slows one rank is added to its finding. What slows all of them has a finding of its own: none waits for another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from distdiag.diagnosis.call_cost import AS_TENSORS, HISTORY, dearest, pickles, uneven
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import WARM_STEPS, RankState, Site, Snapshot, lines_of
from distdiag.diagnosis.model.syntax import Source, line_at
from distdiag.diagnosis.pauses import Pauses
from distdiag.diagnosis.replicas import averaged_by_ddp
from distdiag.diagnosis.slow_case import limits as slow
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.diagnosis.step_times import PHASES, mean_step_s, part_ms, share_of_all
from distdiag.diagnosis.text import straggler as text
from distdiag.diagnosis.text.phrases import at, site_text, wheres
from distdiag.diagnosis.training_data import LARGER, elements
from distdiag.terms.ranks import fold_ranks
from distdiag.terms.units import counted, percent, size_text


@dataclass(frozen=True)
class Limits:
    thread: float = 0.3
    """Share of the time that a thread of a slow rank must compute, beyond the others', to be named. Where cores are scarce, as much as
    another rank computes in all is enough."""
    gained_bytes: int = 64 << 20
    """Bytes by which its memory must have grown to be mentioned."""
    slower: float = 1.25
    """The newest steps must take this many times as long as the steps on average. Steps that have grown steadily to twice their first
    time come to 1.33."""
    newest: int = 32
    """Newest steps whose median is compared."""
    outside: float = 0.3
    """Share of the step time that a line outside all phases takes on every rank, at least; as much as of waits for data or communication."""
    collecting: float = 0.5
    """Share of what it costs that full garbage collections must take to be its cause."""


limits = Limits()
SCHEDULED = "torch.profiler"  # a tool that is on for some steps only, by intent
Why = tuple[str, str]  # (what is added to the message, advice)


class Slow(NamedTuple):
    """One slow rank: its finding, and the share of the time that the others lose to it."""

    found: Finding
    snapshot: Snapshot
    pauses: Pauses
    cost: float

    @property
    def rank(self) -> int:
        return self.found.culprits[0]


def explained(found: Finding, s: Snapshot, pauses: Pauses, cost: float) -> Finding:
    """Return the finding of slow ranks, of one with what explains it.

    Args:
        cost: Share of the time that the others lose to it.
    """
    one, several = Slow(found, s, pauses, cost), len(found.culprits) != 1
    asked = (("", _exchange),) if several else ((cause, of_one) for cause, of_one, _ in EXPLANATIONS)
    known = ((cause, why) for cause, of_one in asked if of_one and (why := of_one(one)))
    cause, (added, advice) = next(known, ("", ("", found.advice)))
    return msgspec.structs.replace(found, cause=cause or found.cause, message=found.message + added, advice=advice)


def of_all_ranks(facts: Facts, known: Collection[str | None]) -> Iterator[Finding]:
    """Yield what makes all ranks slow; `known`: causes of findings that there are already."""
    if len(facts.snapshot.ranks) >= max(1, facts.snapshot.world_size):
        for cause, _, of_all in EXPLANATIONS:
            if of_all and cause not in known:
                yield from of_all(facts)


# -- garbage collections -----------------------------------------------------------------------------------------------


def _collections(one: Slow) -> Why | None:
    """Return the garbage collections, if they are most of what the rank costs."""
    (_, s, pauses, cost), rank = one, one.rank
    share, n = pauses.collecting(s, rank)
    usual = statistics.median_low(pauses.collecting(s, q)[0] for q in s.ranks if q != rank)
    if not n or share - usual < limits.collecting * cost:
        return None
    took = f"{counted(n, 'full garbage collection')} {'take' if n > 1 else 'takes'} {percent(share)} of its time"
    at_once = "" if s.ranks[rank].gc_off else f"; `gc.disable()`, and {text.TOGETHER}, let them pause together"
    return f": {took}, {percent(usual)} on the others", f"{text.FREEZE}{at_once}"


def _collections_of_all(facts: Facts) -> Iterator[Finding]:
    """Yield the full garbage collections that take much of the time of all ranks, whether together or not."""
    s, pauses = facts.snapshot, facts.pauses
    if not pauses.gc_before:
        return
    each = {q: pauses.collecting(s, q) for q in s.ranks}
    least = min(each, key=lambda q: each[q][0])
    share, n = each[least]
    taken_s = s.ranks[least].gc_s - pauses.gc_before[least][1] if least in pauses.gc_before else 0.0
    if n < slow.pauses or share < slow.pauses_share or taken_s * 1e3 < slow.pauses_ms:
        return
    site = _collects(s.ranks[least], share, facts.source)
    yield text.COLLECTING(
        victims=sorted(s.ranks), step=s.ranks[least].step, share=share, n=n, each_s=taken_s / n, site=site,
        where=() if site is None else wheres(s, s.ranks, "user_code", dict.fromkeys(s.ranks, site)),
        by_hand=f", by `gc.collect()`{at(site)}" if site is not None else "",
        do=text.DO_COLLECT["by itself" if site is None else "by hand"].format(instead="" if s.ranks[least].gc_off else ", or not at all"),
        severity=Severity.WARNING if s.ranks[least].step > STEPS.settled else Severity.INFO,
    )  # fmt: skip


def _collects(r: RankState, share: float, source: Source) -> Site | None:
    """Return the line that calls `gc.collect()`, if the rank is seen there in most of the time that its collections take."""
    seen = [x for phase, sites in r.phase_sites.items() if phase != "init" for x in sites]
    at_call = [(n, site) for site, n in seen if "gc.collect(" in line_at(site, source)]
    often = sum(n for n, _ in at_call) >= share / 2 * sum(n for _, n in seen)
    return max(at_call, key=lambda x: x[0])[1] if at_call and often else None


# -- tools -------------------------------------------------------------------------------------------------------------


def _tools(one: Slow) -> Why | None:
    """Return the tools that are on in that rank only."""
    ranks = one.snapshot.ranks
    theirs = {tool for q, r in ranks.items() if q != one.rank for tool in r.tools}
    if not (on := [tool for tool in ranks[one.rank].tools if tool not in theirs]):
        return None
    return f"; {' and '.join(on)} {'is' if len(on) == 1 else 'are'} on there, and on no other rank", text.TOOLS


def _tools_of_all(facts: Facts) -> Iterator[Finding]:
    """Yield the tools that are on in all ranks."""
    ranks = facts.snapshot.ranks
    step = min(r.step for r in ranks.values())
    tools = set.intersection(*(set(r.tools) for r in ranks.values())) - {SCHEDULED}
    if tools and step > STEPS.settled:
        yield text.TOOLS_ON(victims=sorted(ranks), step=step, tools=" and ".join(sorted(tools)))


# -- too few CPUs ------------------------------------------------------------------------------------------------------


def _few_cpus_of_all(facts: Facts) -> Iterator[Finding]:
    """Yield the ranks of a host whose affinity masks hold fewer CPUs than there are ranks, if they wait for a CPU."""
    for node in sorted({r.node for r in facts.snapshot.ranks.values()}):
        ranks = [r for r in facts.snapshot.ranks.values() if r.node == node]
        cpus = sorted({cpu for r in ranks for cpu in r.cpus})
        queued = min(r.queued_share or 0.0 for r in ranks)
        if len(cpus) >= len(ranks) or not all(r.cpus for r in ranks) or queued < slow.queued:
            continue
        launcher = max(r.launcher_cpus for r in ranks)
        own = launcher > len(cpus)
        yield text.FEW_CORES(
            victims=(named := sorted(r.rank for r in ranks)), step=min(r.step for r in ranks), share=queued, ranks=rank_list(named),
            cpus=f"CPU{'s' if len(cpus) > 1 else ''} {fold_ranks(cpus)}",
            do="; or ".join(text.DO_FEW_CORES[x] for x in ("ranks", "launcher") if not launcher or (x == "ranks") is own),
            bound=f"; their launcher may use {launcher}" if own else "; so may their launcher" if launcher else "",
        )  # fmt: skip


# -- a thread, more data -----------------------------------------------------------------------------------------------


def of_thread(rank: int, s: Snapshot) -> Why | None:
    """Return the thread that takes the GIL or a core from the training; None if the others have such a one, too."""
    r, others = s.ranks[rank], [x for q, x in s.ranks.items() if q != rank]
    usual = statistics.median_low(x.thread_share for x in others)
    computed = statistics.median_low(x.cpu_pct or 100.0 for x in others)
    if r.thread_share - usual < min(limits.thread, computed / 100):
        return None
    share, theirs = percent(r.thread_share), percent(usual)
    thread = f"its thread {r.thread!r} computes {share} of the time{at(r.thread_site)}, {theirs} on the others"
    return f"; {thread}", text.THREAD


def _more_data(one: Slow) -> Why | None:
    """Return how much more data the rank gets: forwards in a step, or elements in a batch; None if it gets no more."""
    found, s, *_ = one
    forwards = {q: sum(m.forwards for m in r.models) / r.step for q, r in s.ranks.items() if r.step}
    for of, more, advice, causes in (
        (forwards, "it has made {own:.1f} forwards per step so far, the others {usual:.1f}", text.MORE,
         ("forward", "backward", "data", "host")),
        (elements(s), "its batches are {times:.1f} times as large: {own:,.0f} elements on average, {usual:,.0f} on the others", text.LARGER,
         ("forward", "backward", "data")),
    ):  # fmt: skip
        own = of.pop(found.culprits[0], 0.0)
        usual = statistics.median(of.values()) if of else 0.0
        if found.cause in causes and usual and own >= LARGER * usual:
            return f"; {more.format(own=own, usual=usual, times=own / usual)}", advice
    return None


def _exchange(one: Slow) -> Why | None:
    """Return in which all_to_all the slow ranks receive more than an even share; None if there is none."""
    exchange = uneven(one.snapshot)
    if exchange is None or (times := min(exchange.shares[q] for q in one.found.culprits)) < LARGER:
        return None
    what = "it receives" if len(one.found.culprits) == 1 else "they receive at least"
    return f"; in {exchange.where}, {what} {times:.1f} times an even share", text.EXPERTS


# -- growth ------------------------------------------------------------------------------------------------------------


def _growth(one: Slow) -> Why | None:
    """Return what grows: the rank's memory, if that is much and the others' little, or the time of its steps."""
    (found, s, *_), rank, grows = one, one.rank, []
    grown = {q: (points[-1][1] - points[0][1], points[-1][0] - points[0][0])
             for q, r in s.ranks.items() if (points := [x for x in r.memory if x[0] >= (r.warm_since_s or math.inf)])}  # fmt: skip
    n_bytes, span_s = grown.pop(rank, (0, 0.0))
    theirs = max((n for n, _ in grown.values()), default=n_bytes)
    if found.cause == "host" and n_bytes >= limits.gained_bytes and 4 * theirs <= n_bytes:
        grows.append(
            f"its memory has grown by {size_text(n_bytes)} in {span_s:.0f} s, that of the others by {size_text(max(0, theirs))}"
        )
    if (longer := _longer(s.ranks[rank], one.pauses)) is not None:
        grows.append("steps take longer with time: {:.0f} ms now, {:.0f} ms on average so far".format(*longer))
    return ("".join(f"; {x}" for x in grows), f"{text.KEEPS}; {found.advice}") if grows else None


def _growth_of_all(facts: Facts) -> Iterator[Finding]:
    """Yield steps that take longer with time on all ranks, with the phase that is most of one now."""
    s, longer = facts.snapshot, {q: _longer(r, facts.pauses) for q, r in facts.snapshot.ranks.items()}
    known = {q: x for q, x in longer.items() if x is not None}
    if len(known) < len(longer):
        return
    slowest = s.ranks[max(known, key=lambda q: known[q])]
    now_ms, mean_ms = known[slowest.rank]
    newest = slowest.steps[-limits.newest :]
    phase_ms, phase = max((statistics.median(part_ms(x, p) for x in newest), p) for p in PHASES)
    sites = {q: next(iter(text.stack_of(r, phase)), None) for q, r in s.ranks.items()}
    line = dearest(s, facts.source, None)
    grew = line.grew if line is not None else None
    yield text.GROWING(
        calls="; the calls of {} at {} carry ever more, from {} to {}".format(line.op, site_text(line.site), *map(size_text, grew)) if line and grew else "",
        do=text.KEEPS if grew is None else HISTORY,
        victims=sorted(s.ranks), step=slowest.step, where=wheres(s, s.ranks, "user_code", sites), site=sites[slowest.rank],
        now_ms=now_ms, mean_ms=mean_ms, phase_ms=phase_ms, more=now_ms / mean_ms, part="most" if 2 * phase_ms > now_ms else "the largest part", phase="the code between steps" if phase == "other" else phase,
    )  # fmt: skip


def _has_more_to_do(r: RankState) -> bool:
    """True if a rank's newest steps take more samples than those before them, or accumulate more batches than all so far."""
    before, newest = r.steps[: -limits.newest], r.steps[-limits.newest :]
    now, then = (statistics.fmean(x.samples for x in of) for of in (newest, before))
    batches = statistics.fmean(x.samples / max(x.batch, 1) for x in newest)
    forwards = max((m.forwards for m in r.models), default=0)
    return now >= LARGER * then > 0 or (forwards >= r.step and batches * r.step >= LARGER * forwards)


def _longer(r: RankState, pauses: Pauses | None = None) -> tuple[float, float] | None:
    """Return (ms of a rank's newest steps, of its steps on average), if these take longer with time; None if they do not.

    Longer than those before them, too: after a slow start, or a pause that is over, they do not. None as well if they have more to do:
    more batches are accumulated, or these are larger; or if what the rank waits for a CPU now, beyond what it usually does, may be all of it; without `pauses` that
    is not known.
    """
    mean_s, n = mean_step_s(r), limits.newest
    if mean_s is None or r.step - WARM_STEPS < 2 * n or len(r.steps) <= n or _has_more_to_do(r):
        return None
    before_ms, now_ms = (statistics.median(x.step_ms for x in of) for of in (r.steps[-2 * n : -n], r.steps[-n:]))
    busier = (
        (1.0 - (r.queued_share or 0.0)) / max(1e-3, 1.0 - pauses.usually_queued(r.rank)) if pauses is not None else 1.0
    )
    longer = now_ms > before_ms and now_ms * min(1.0, busier) >= limits.slower * mean_s * 1e3
    return (now_ms, mean_s * 1e3) if longer else None


def _outside_of_all(facts: Facts) -> Iterator[Finding]:
    """Yield the line between DDP's passes that takes much of every rank's steps, if it exchanges objects, or these take longer with time.

    Only a busy host leaves that open, or `_growth_of_all` finds it. Another line may be what the job is for: a simulator.
    """
    s, window = facts.snapshot, facts.window
    grown = any(f.cause == text.GROWING.cause for f in facts.reported)
    if grown or isinstance(window, Abstained) or averaged_by_ddp(s) != "each_step":
        return
    others = share_of_all(window, lambda x: part_ms(x, "other"), limits.outside)
    seen = [dict(s.ranks[q].phase_sites.get("other", ())) for q in window.ranks] if others else [{}]
    shares = {
        site: others * min(of[site] / sum(of.values()) for of in seen) for site in set.intersection(*map(set, seen))
    }
    site = max(shares, key=lambda line: shares[line], default=None)
    if site is None or shares[site] < limits.outside:
        return
    ranks = [s.ranks[q] for q in window.ranks]
    objects, longer = pickles(site, facts.source), _longer(ranks[0])
    grows = all(_longer(r) for r in ranks) and not all(_longer(r, facts.pauses) for r in ranks)
    called = any((site.file, site.line) in lines_of(key) for r in ranks for key in r.sites)
    if objects or (grows and not called):
        yield text.OUTSIDE(
            longer="; a step takes {:.0f} ms now, {:.0f} ms on average so far".format(*longer) if longer is not None else "",
            do=AS_TENSORS if objects else f"{text.KEEPS}; {text.BUSIER}", victims=window.ranks, step=ranks[0].step, share=shares[site], site=site,
            where=wheres(s, window.ranks, "user_code", dict.fromkeys(window.ranks, site)),
        )  # fmt: skip


class Explanation(NamedTuple):
    """One thing that makes ranks slow.

    Attributes:
        cause: Of the finding that it explains or makes; empty: it leaves the cause as it is.
        of_one: Return what it adds to the finding of one slow rank; None if it is not the reason, or the others have it, too.
        of_all: Yield its finding if it slows all ranks.
    """

    cause: str
    of_one: Callable[[Slow], Why | None] | None = None
    of_all: Callable[[Facts], Iterator[Finding]] | None = None


EXPLANATIONS = (  # the first that explains one rank counts
    Explanation("cores", of_all=_few_cpus_of_all),
    Explanation("gc", _collections, _collections_of_all),
    Explanation("", _tools, _tools_of_all),
    Explanation("host", lambda one: of_thread(one.rank, one.snapshot)),  # in whichever phase it takes the time
    Explanation("", _more_data),
    Explanation("", _exchange),
    Explanation("", _growth, _growth_of_all),
    Explanation("outside", of_all=_outside_of_all),
)
