"""straggler: a rank is late in a sustained share of steps, and the others wait for it.

The slow rank is the one that waits least (see `step_times`). The cost is counterfactual: the step
time if this rank were like the others; `wait` in tables is more: it has the waits for all others.
A rank that is slow in some steps only is a straggler if it costs the others a fifth of their time,
at regular intervals 15 %. Pauses that are too rare for that are summed over the job, with what
follows its last step as one; those of the first 50 steps, in which kernels for new shapes are
built, make no warning. If the slowest rank keeps changing, the cause is `rotating` and no rank is
blamed; nor is one for what makes all of them slow: full garbage collections (`gc`), a debugging
tool that stays on (`tools`), steps that take longer with time (`growth`), one line outside all
phases (`outside`). In a loop without optimizer steps, the straggler is the rank that enters its
collectives last.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping

from distdiag.diagnosis import comparison, kinds
from distdiag.diagnosis.comparison import COSTLY, Subset, leads, others
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Arrival, RankState, Site, Snapshot
from distdiag.diagnosis.model.syntax import line_at
from distdiag.diagnosis.pauses import Lost, Pauses, validates
from distdiag.diagnosis.slow_because import explained, of_all_ranks, of_thread
from distdiag.diagnosis.slow_case import VETOES, Case, at_lock, busy, case_of, limits, sleeps
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.diagnosis.step_times import PHASES, Window, part_ms, self_ms
from distdiag.diagnosis.text import straggler as text
from distdiag.diagnosis.text.phrases import at, waited_for_worker, where, where_stack, wheres
from distdiag.diagnosis.training_data import LARGER, least_fetching
from distdiag.terms.activity import by_line
from distdiag.terms.units import counted

kind = kinds.STRAGGLER
JUDGED_BY_ARRIVAL = (
    "all_reduce", "barrier", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all"
)  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the straggler, or why there is none, and the ranks whose pauses sum up."""
    by_thread = {f.culprits for f in facts.reported if f.kind == kind.name and f.advice == text.THREAD}
    # while a thread is known to make a rank slow, it is slow in whichever phase gets the GIL later
    found = _in_window(facts)
    outcomes = [x for x in found if isinstance(x, Abstained) or x.advice == text.THREAD or x.culprits not in by_thread]
    of_one = [f for f in (*outcomes, *facts.reported) if isinstance(f, Finding) and f.culprits]
    slow = [f for f in of_one if f.kind == kind.name and f.severity == Severity.WARNING]
    # the sum of its pauses would only repeat these
    known = {f.culprits for f in slow if f.cause not in (text.PAUSES.cause, "gc")}
    told = [f.where[0] for f in facts.reported if f.kind == kind.name and f.cause != text.PAUSES.cause and f.where]

    def repeats(f: Finding) -> bool:
        first = next(iter(f.where), None)
        return f.culprits in known or (f.severity == Severity.INFO and bool(first and first.file) and first in told)

    pauses = [f for f in list(_in_turn(facts)) or _pauses(facts) if not repeats(f)]
    summed = {f.culprits for f in pauses}
    yield from (x for x in outcomes if isinstance(x, Abstained) or x.culprits not in summed)
    yield from pauses
    yield from of_all_ranks(facts, {f.cause for f in (*pauses, *slow)})


def _pauses(facts: Facts) -> Iterator[Finding]:
    """Yield the ranks whose pauses have cost the others enough, whatever those are for."""
    s, pauses = facts.snapshot, facts.pauses
    for rank, lost in pauses.lost().items():
        share, total_s = pauses.share(lost), lost.ms / 1e3
        enough = share >= limits.pauses_info and lost.ms >= limits.pauses_ms
        if lost.times < limits.pauses or not enough or rank not in s.ranks:
            continue
        stack = lost.stack or text.stack_of(s.ranks[rank], lost.phase)
        lasting = _lasting(pauses, lost)
        writes = any(by_line(line_at(x, facts.source), idle=True) in ("checkpoint", "socket") for x in stack)
        work = "validation" if validates(stack) and not writes else lost.phase
        workers = lost.phase == "data" and any(x.workers for x in s.ranks[rank].loaders if x.in_training)
        found = text.PAUSES(
            severity=Severity.WARNING if share >= limits.pauses_share and lasting else Severity.INFO,
            culprits=(rank,), victims=[q for q in sorted(s.ranks) if q != rank], step=s.ranks[rank].step,
            where=where_stack(s.ranks[rank], stack, "user_code"), site=stack[0] if stack else None,
            n=lost.times, total_s=total_s, share=share, mean_s=total_s / lost.times, longest_s=lost.longest_ms / 1e3,
            early="" if lasting else text.early(lost.times - lost.settled_times, STEPS.settled),
            worker=waited_for_worker(s.ranks[rank]) if workers else "",
            do=text.DO_PAUSES.get("workers" if workers else work, text.DO_PAUSES["other"]),
        )  # fmt: skip
        yield explained(found, s, pauses, share)


def _lasting(pauses: Pauses, *lost: Lost) -> bool:
    """True if ranks go on pausing after the job's first steps, in which kernels are built and caches fill."""
    enough = sum(x.settled_times for x in lost) >= limits.pauses and pauses.settled_share(*lost) >= limits.pauses_share
    return enough and sum(x.settled_ms for x in lost) >= limits.pauses_ms


def _in_turn(facts: Facts) -> Iterator[Finding]:
    """Yield ranks that pause one after the other: none of them costs most of what all cost.

    On a busy host ranks pause by chance; garbage collections are none, and a line at which all do shows what differs.
    """
    s, pauses = facts.snapshot, facts.pauses
    every = pauses.lost()
    most = max((lost.times for lost in every.values()), default=0)
    least = limits.pauses - (most == limits.pauses)  # one has its turn before the others
    of = {q: lost for q, lost in sorted(every.items()) if lost.times >= least and q in s.ranks}
    lost_ms = sum(lost.ms for lost in of.values())
    enough = pauses.span_s > 0 and lost_ms / 1e3 / pauses.span_s >= limits.pauses_share
    alone = any(lost.ms >= limits.recurrence * lost_ms for lost in of.values())
    if len(of) < 2 or not enough or lost_ms < limits.pauses_ms or alone:
        return
    gc = min(pauses.collecting(s, q)[0] for q in of) >= min(map(pauses.share, of.values())) / 2
    sites = {q: next(iter(lost.stack or text.stack_of(s.ranks[q], lost.phase)), None) for q, lost in of.items()}
    lines = {site.key if site is not None else None for site in sites.values()}
    lasting, one_line = _lasting(pauses, *of.values()), lines.pop() if len(lines) == 1 else None
    sure = gc or (lasting and not busy(s))
    if not sure and one_line is None:
        return
    each = (f"{rank_list([q])} {counted(of[q].times, 'time')} for {of[q].ms / 1e3:.1f} s" for q in [*of][:4])
    seconds = sum(s.ranks[q].gc_s for q in of) / len(of)
    yield text.IN_TURN(
        cause="gc" if gc else None, victims=sorted(s.ranks), step=s.ranks[max(of, key=lambda q: of[q].ms)].step,
        where=wheres(s, of, "user_code", sites), each=", ".join(each), share=lost_ms / 1e3 / pauses.span_s,
        total_s=lost_ms / 1e3, gc=f"; full garbage collections took {seconds:.1f} s of each" if gc else "",
        one_line="" if gc or one_line is None else f", all{at(sites[min(of)])}",
        early="" if lasting else text.early(sum(x.times - x.settled_times for x in of.values()), STEPS.settled, "the"),
        do=text.DO_IN_TURN["gc" if gc else "work" if one_line is None else "amount"],
        severity=None if sure else Severity.INFO,
    )  # fmt: skip


def _in_window(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the straggler of the last steps, or why there is none."""
    s, window = facts.snapshot, facts.window
    if isinstance(window, Abstained):
        by_arrivals = _by_arrivals(s)
        # the end of a job with optimizer steps: what was found by those says more
        if by_arrivals and any(f.key == by_arrivals.key and s.ranks[f.culprits[0]].step for f in facts.reported):
            by_arrivals = None
        yield by_arrivals or window
        return
    case = case_of(facts, window)
    veto = comparison.vetoed(VETOES, case)
    if veto is not None:
        newest = comparison.newest(window, limits.recurrence, limits.chance, limits.sustained_s)
        of_newest = case_of(facts, newest) if newest is not None else case
        if comparison.vetoed(VETOES, of_newest) is None and not of_newest.stages and _is_new(window, of_newest):
            case, veto = of_newest, None
    slow = case.slow
    if veto is not None:
        reported = any(f.cause == text.ROTATING.cause for f in facts.reported)
        yield _slow_device(case) or _by_thread(case) or _rotating(case, reported) or _at_times(case) or veto
    elif case.stage:
        works = {q: statistics.median(map(self_ms, steps)) for q, steps in case.window.steps.items()}
        theirs = sorted({round(works[q]) for q in case.rest})
        yield text.found(
            text.STAGE, s, case.window, [case.most.rank], case.phase, case.source, share=slow.gain_ms / slow.step_ms,
            where=(), ms=works[case.most.rank], slow=slow,  # all that it computes, not one line
            theirs=" to ".join(map(str, theirs[:: max(1, len(theirs) - 1)])),
        )  # fmt: skip
    else:
        found = explained(text.slow(case), s, facts.pauses, slow.gain_ms / slow.step_ms)
        # without a new step, the kernel's clocks show what follows the steps: how the job ends
        yield next((f for f in facts.reported if f.key == found.key and f.step == found.step), found)


def _is_new(window: Window, case: Case) -> bool:
    """True if in few of the steps before the case's another rank is the slowest by as much: where ranks are slow in turn, one leads by chance."""
    before = leads(window.columns[: -len(case.window.columns)])
    turns = sum(2 * ms >= case.slow.gain_ms and window.ranks[i] not in case.slow.ranks for i, ms in before)
    return turns <= (1 - limits.recurrence) * len(window.columns)


def _by_thread(case: Case) -> Finding | None:
    """Return the finding of a rank with a thread that takes the time of its training, by what its steps cost on average.

    Medians hide it: a thread that holds the GIL for long makes few steps much longer, and blurs who waits, because a rank returns
    from its waits only with the GIL.
    """
    s, window = case.snapshot, case.window
    rank = max(window.ranks, key=lambda q: s.ranks[q].thread_share)
    works = {q: statistics.fmean(map(self_ms, steps)) for q, steps in window.steps.items()}
    theirs_ms = max(ms for q, ms in works.items() if q != rank)
    (ratio, share), gain = limits.shares[1], comparison.gain(window, [rank])
    if case.stages or gain is None or gain.share < share or works[rank] < ratio * theirs_ms or not of_thread(rank, s):
        return None
    site = s.ranks[rank].thread_site
    by_thread = text.BY_THREAD(
        culprits=(rank,), victims=[q for q in window.ranks if q != rank], step=s.ranks[rank].step,
        where=[where(s.ranks[rank], "user_code", site)], site=site, ms=works[rank], theirs_ms=theirs_ms, share=gain.share,
    )  # fmt: skip
    return explained(by_thread, s, case.pauses, gain.share)


# -- one device, whose host is not late ---------------------------------------------------------------------------------


def _slow_device(case: Case) -> Finding | None:
    """Return the finding of a rank whose device takes longer for the forward of DDP, by CUDA events.

    Its host launches as early as the others', so that arrivals do not show it. Devices leave the reduction of
    the gradients together, and nothing is waited for in the forward that follows.
    """
    s, window = case.snapshot, case.window
    ranks = [s.ranks[q] for q in window.ranks]
    if not window.inferred or not all(r.device_total_bytes and any(m.group for m in r.models) for r in ranks):
        return None
    columns = window.parts("forward")
    index, count = Counter(at_top for at_top, _ in leads(columns)).most_common(1)[0]
    others_ms = [others(column, index) for column in columns]
    usual_ms = statistics.median(others_ms)
    excess_ms = statistics.median(column[index] - ms for column, ms in zip(columns, others_ms, strict=True))
    step_ms = window.step_ms(ranks[index].rank)
    ratio, share = limits.shares[-1][0], limits.shares[0][1]
    enough_ms = max(limits.least_ms, share * step_ms, (ratio - 1) * usual_ms)
    if count < limits.recurrence * len(columns) or excess_ms < enough_ms:
        return None
    return text.found(
        text.DEVICE, s, window, [ranks[index].rank], "forward", case.source, share=excess_ms / step_ms,
        count=count, ms=usual_ms + excess_ms, usual_ms=usual_ms, excess_ms=excess_ms,
    )  # fmt: skip


# -- another rank in each step, and some steps ---------------------------------------------------------------------------


def _rotating(case: Case, reported: bool) -> Finding | None:
    window = case.window if case.at_times is None else case.window.without(case.at_times.indices)
    found = None if case.stages else comparison.rotating(window, limits.rotating_steps, limits.rotating_changes)
    if found is None:
        return None
    changes, subset = found
    parts = {phase: window.parts(phase) for phase in PHASES}
    phase = max(PHASES, key=lambda p: statistics.median(max(column) - min(column) for column in parts[p]))
    slowest = zip(parts[phase], subset.indices, strict=True)
    ratio = statistics.median(column[index] / max(0.1, others(column, index)) for column, index in slowest)
    # what ranks or their loaders compute takes longer in turns, too, where other processes have the CPUs; a rank that has just waited has
    # queued for none
    queued = [x for q in window.ranks if (x := case.snapshot.ranks[q].queued_share) is not None]
    starved = [x for r in case.snapshot.ranks.values() if (x := r.workers_starved) is not None]
    computes = case.busy and phase != "other" and not (phase == "data" and starved)
    queued_ms = max(queued) * subset.step_ms if queued and computes else 0.0
    sized = _by_size(window, subset)  # no chance, nor a load of the host
    known = sized is not None or reported  # what was reported is kept while much of it lasts
    share = limits.pauses_share if known else limits.rotating_share
    jitter = subset.gain_ms - (queued_ms if sized is None else 0.0) < max(2 * limits.jitter_ms, share * subset.step_ms)
    at_limit = phase == "data" and 1.0 - least_fetching(case.snapshot) < limits.rotating_share
    lacks_cpu = phase == "data" and case.busy and max(starved, default=0.0) > limits.starved
    slower_core = sized is None and ratio < limits.shares[0 if case.busy else 1][0]  # or one that others use
    if jitter or at_limit or lacks_cpu or slower_core or _meet_rarely(window, subset):
        return None
    states, ranks = case.snapshot.ranks, window.ranks
    sites = {q: next(iter(text.stack_of(states[q], phase)), None) for q in ranks}
    return text.ROTATING(
        victims=ranks, where=wheres(case.snapshot, ranks, None, sites), step=states[ranks[0]].step,
        changes=changes, n=len(window.columns), found=subset, phase="code between steps" if phase == "other" else phase,
        share=subset.gain_ms / subset.step_ms, do=text.LARGER if sized is not None else _in_turn_advice(case, phase, sites),
        sized="" if sized is None else f"; in {sized[0]} of these the slowest has the largest batch, {sized[1]:.1f} times the others'",
        severity=Severity.INFO if sized is not None and subset.gain_ms < limits.rotating_share * subset.step_ms else None,
    )  # fmt: skip


def _by_size(window: Window, slowest: Subset) -> tuple[int, float] | None:
    """Return (steps in which the slowest rank has the largest batch, its size as a multiple of the others'), if sizes explain who is slowest."""
    sizes = list(zip(*([float(x.elements) for x in window.steps[q]] for q in window.ranks), strict=True))
    if not all(map(min, sizes)):
        return None
    times = [column[i] / others(column, i) for column, i in zip(sizes, slowest.indices, strict=True)]
    n = sum(column[i] == max(column) > min(column) for column, i in zip(sizes, slowest.indices, strict=True))
    larger = statistics.median(times)
    return (n, larger) if n >= limits.recurrence * len(sizes) and larger >= LARGER else None


def _in_turn_advice(case: Case, phase: str, sites: Mapping[int, Site | None]) -> str:
    """Return what to do about ranks that are slow in turn in this phase, at these sites."""
    if at_lock([case.snapshot.ranks[q].phase_sites.get(phase, ()) for q in sites], case.source) is not None:
        return text.DO_ROTATING["lock"]
    if (x := case.exchange) is not None:
        return f"in {x.where}, one rank receives {x.ratio:.1f} times an even share: {text.EXPERTS}"
    if len(lines := {site.key if site is not None else None for site in sites.values()}) > 1 or None in lines:
        return text.DO_ROTATING["work"]
    asleep = all(_sleeps(case.snapshot.ranks[q], case.window, phase) for q in sites)
    return text.DO_ROTATING["shared" if asleep else "line"]


def _sleeps(r: RankState, window: Window, phase: str) -> bool:
    """True if a rank neither computes nor lacks a CPU for most of what this phase takes."""
    if r.queued_share is None:
        return False
    phase_ms = statistics.median(part_ms(x, phase) for x in window.steps[r.rank])
    return sleeps(r, window, phase_ms - r.queued_share * window.step_ms(r.rank))


def _meet_rarely(window: Window, subset: Subset) -> bool:
    """True if in most steps no rank waits for as long as the slowest one works longer: they exchange nothing in them."""
    longest_ms = (max(x.wait_ms for x in column) for column in zip(*window.steps.values(), strict=True))
    return not window.inferred and statistics.median(longest_ms) < subset.gain_ms / 2


def _at_times(case: Case) -> Finding | None:
    """Return the finding of a rank that is slow in some steps: info, unless it costs much and is no duty."""
    found = case.at_times
    # without a period, ranks that compete for cores have such steps by chance, stages by design
    if found is None or (found.period is None and (case.busy or case.stages)):
        return None
    steady = len(found.indices) > 3 and 2 * (found.indices[-1] - found.indices[0]) >= len(case.window.columns)
    r = case.snapshot.ranks[found.ranks[0]]
    # the first of a node logs and saves, any may validate
    for_all = r.local_rank == 0 or r.phase_sites.get("validate") or r.phase_sites.get("checkpoint")
    # at regular intervals it is no chance: what is lost counts, whatever the rank does
    lasting = found.period is not None and found.cost >= limits.pauses_share
    severe = steady and (lasting or (found.cost >= COSTLY and not for_all))
    at_times = text.at_times(case, found, Severity.WARNING if severe else Severity.INFO)
    return explained(at_times, case.snapshot, case.pauses, found.cost)


# -- loops without an optimizer --------------------------------------------------------------------------------------


def _by_arrivals(s: Snapshot) -> Finding | None:
    by_group: dict[str, list[Arrival]] = {}
    for a in s.arrivals:
        if s.whole(a.group):
            by_group.setdefault(a.group, []).append(a)
    for arrivals in by_group.values():
        recent = [a for a in arrivals if a.op in JUDGED_BY_ARRIVAL][-STEPS.window :]
        if len(recent) < STEPS.least:
            continue
        rank, count = Counter(a.late_rank for a in recent).most_common(1)[0]
        costs: Counter[int] = Counter()
        for a in arrivals:
            costs[a.late_rank] += int(min(a.skew_ms, a.waited_ms) * 1e3) if a.t_s >= recent[0].t_s else 0
        if costs.most_common(1)[0][0] != rank:
            continue  # it waits longer for another one: for a root that sends late, such as a learner for its actors
        # entering an asynchronous operation late may cost nothing
        skew_ms = statistics.median(min(a.skew_ms, a.waited_ms) for a in recent)
        period_ms = (recent[-1].t_s - recent[0].t_s) * 1e3 / (len(recent) - 1)
        enough = skew_ms >= max(limits.jitter_ms if busy(s) else limits.least_ms, limits.shares[1][1] * period_ms)
        if count < limits.recurrence * len(recent) or not enough or rank not in s.ranks:
            continue
        r = s.ranks[rank]
        stack = max(r.phase_stacks.values(), key=len, default=r.user_stack)
        stack = next((r.phase_stacks[name] for name in ("other", "init") if r.phase_sites.get(name)), stack)
        ops = {a.op for a in recent}
        return text.BY_ARRIVAL(
            culprits=(rank,), victims=[q for q in sorted(s.ranks) if q != rank],
            where=where_stack(r, stack), site=stack[0] if stack else None,
            op=ops.pop() if len(ops) == 1 else "its collectives", count=count, n=len(recent), skew_ms=skew_ms,
            period_ms=period_ms,
        )  # fmt: skip
    return None
