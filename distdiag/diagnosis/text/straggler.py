"""The findings of rule `straggler`: their sentences, and where a slow rank is."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from distdiag.diagnosis import kinds
from distdiag.diagnosis.comparison import Subset, gain
from distdiag.diagnosis.model.findings import Finding, Severity, rank_list
from distdiag.diagnosis.model.guards import GuardKind
from distdiag.diagnosis.model.snapshot import RankState, Site, Snapshot
from distdiag.diagnosis.model.snapshot import lines_of as lines_of_key
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.step_times import PHASES, Window, part_ms
from distdiag.diagnosis.text.conditions import guard_text
from distdiag.diagnosis.text.phrases import ordinal, where, where_stack
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.training_data import elements
from distdiag.terms.units import percent

THREAD = (
    "Python runs one thread at a time (GIL), and that one takes it from the training: do its work in another process, less often "
    "or on less data, or let it sleep in between"
)
_row = partial(Template, kinds.STRAGGLER)
SLOW = _row("host",
    "{culprits}: {what} takes {up_to}{longer_ms:.0f} ms longer per step than on the others{queued}, {slower} in {count} of "
    "the last {n} steps{site}",
    "{victims} {victims:loses|lose} {slow.gain_ms:.0f} ms of a step of {slow.step_ms:.0f} ms (medians of these steps){gain}",
    "{do}")  # fmt: skip
CROWDED = _row("cores",
    "{culprits} shares {of} with {who}, which want to run as well: {what} takes {x.phase_ms:.0f} ms longer per step "
    "than on the others, slowest in {count} of the last {n} steps{site}",
    "{victims} {victims:loses|lose} {slow.gain_ms:.0f} ms of a step of {slow.step_ms:.0f} ms (medians of these steps){gain}",
    "give {them} other cores (`os.sched_setaffinity`, `taskset`), or start fewer; a child inherits the mask of its "
    "parent")  # fmt: skip
FEW_CORES = _row("cores",
    "{ranks} may run on {cpus} only, although there are more for the job: each is ready to run and waits for a CPU at least {share:share} of the "
    "time{bound}", "{share:share} of the time of every rank", "{do}")  # fmt: skip
DO_FEW_CORES = {
    "ranks": "bind each rank to CPUs of its own, by LOCAL_RANK, or do not bind: `os.sched_setaffinity` in the script or a library (psutil's "
    "`cpu_affinity`), `taskset` or `numactl` around each rank; a variable that the launcher does not set (SLURM_LOCALID under torchrun) is the same on all ranks",
    "launcher": "start the launcher with more CPUs: `taskset` or `numactl` before it, the batch system's binding (`srun --cpu-bind=none`, "
    "`--cpus-per-task`) or the shell that it was started from restrict it",
}
STAGE = _row("stage", "{culprits}, the longest stage, works {ms:.0f} ms of a step of {slow.step_ms:.0f} ms, {victims} {victims:works|work} {theirs} ms",
    "{victims} {victims:is|are} idle for {slow.gain_ms:.0f} ms per step because of it: {share:share} of step time",
    "the longest stage sets the pace: move layers from {culprits} to the others, if this pipeline is too slow; more micro-batches shorten "
    "only the idle time at the start and end of a step", severity=Severity.INFO)  # fmt: skip
BY_THREAD = _row("host",
    "{culprits} works {ms:.0f} ms per step on average, at most {theirs_ms:.0f} ms on the others",
    "if {culprits} were as fast as {victims}, a step would take {share:share} less", THREAD)  # fmt: skip
DEVICE = _row("forward",
    "{culprits}: forward takes {ms:.0f} ms on its device, {usual_ms:.0f} ms on the others', slowest in {count} "
    "of the last {n} steps; its host is not late",
    "{victims} {victims:waits|wait} at least {excess_ms:.0f} ms per step: {share:share} of step time",
    "compare the input sizes of {culprits} with the others'; if they are equal, check its device: clocks, power "
    "limit, temperature, other processes")  # fmt: skip
AT_TIMES = _row("host",
    "{culprits}: {what} takes {found.gain_ms:.0f} ms longer in {when}{found.indices:#} of the last {n}{steps}{site}",
    "{victims} {victims:waits|wait} {found.cost:share} of the time for it", "{do}")  # fmt: skip
ROTATING = _row("rotating",
    "no single rank is slow: the slowest changed {changes} times in {n} steps, skew p50 {found.gain_ms:.0f} ms, "
    "mostly in {phase}{sized}", "{share:share} of step time is spent waiting for the slowest rank",
    "{do}")  # fmt: skip
PAUSES = _row("pauses",
    "{culprits} kept the others waiting {n} times, for {total_s:time} in all, {share:share} of the training time{site}{worker}{early}",
    "{victims} {victims:waits|wait} {mean_s:.1f} s on average, at most {longest_s:.1f} s, in {culprits}'s pauses",
    "{do}", proved=True)  # fmt: skip
IN_TURN = _row("rotating",
    "no single rank is slow, but they pause in turn: {each}; {share:share} of the training time in all{gc}{one_line}{early}",
    "in each pause all other ranks wait: {total_s:time} in all", "{do}", proved=True)  # fmt: skip
COLLECTING = _row("gc",
    "full garbage collections take at least {share:share} of the time of every rank: {n} collections of {each_s:.1f} s each since the warm-up{by_hand}",
    "{share:share} of the time", "{do}", proved=True)  # fmt: skip
BY_ARRIVAL = _row("host",
    "{culprits} enters {op} last in {count} of the last {n}, {skew_ms:.0f} ms after the first{site}",
    "the others wait {skew_ms:.0f} ms of every {period_ms:.0f} ms",
    "look at what {culprits} does between its collectives that the others do not")  # fmt: skip
_COMPUTES = "{sizes}check {clocks}what else runs on its host"
_SIZES = "compare the input sizes of that rank with the others'; if they are equal, "
_SAME_SIZES = "its batches are as large as the others': "
_READS = (
    "compare what {who} reads with the others (longer samples, larger files, another shard), and share it out evenly; "
)
_DO = {
    "data": _READS + "check its storage and its CPU load; use more workers or prefetching",
    "no workers": _READS + "with num_workers=0 the dataset's own code runs in the training process: set num_workers",
    "forward": _COMPUTES,
    "backward": _COMPUTES,
    "optimizer": "look for work in optimizer.step that only that rank does (hooks, logging); if each rank steps parameters of its own, share them "
    "out by their cost, not by their number",
    "other": "move that work off the training step: do it in fewer steps, in the same step on all ranks, or in a thread",
    "idle": "it waits there and computes little: see for what (a lock that another thread holds, a disk, a socket, a sleep), and take that wait "
    "out of the step",
    "lock": "it waits there for a lock that another thread or process holds: hold it for less time (copy what is needed under the lock, then "
    "write, send or compute outside it)",
    "hands out": "{who} reads the data of all ranks and hands it out: let each rank read its own part (shard the stream by rank; in Accelerate "
    "`dispatch_batches=False`), or let workers prepare the batches ahead",
    "queue": "see what fills that queue, on all ranks: a producer that needs longer than a step; start more of them, or let each do more at once",
}
_WAITS = {"lock": "waiting for a lock", "queue": "waiting for a queue"}
_NOT_KNOWN = "; how fast the others' queues are filled is not known: they fill while they wait"
_SAME_CODE = "the same code is fast on the other ranks: "
_OWN = "that line is not seen on the other ranks{under}; "
_OWN_LINE = "see what makes {who} run it (a hook, a debug or logging branch, another path), and take that work out of the step or let it run rarely"
_CAUGHT = (
    "that line is under {caught}: find out why {who} gets that exception (log it there; its storage, its connection or one of its files may fail, and it "
    "tries again), and mend the cause"
)
_LEFT_OUT = (
    "that line is not seen on {rest}: see what lets {rest} leave that work out (a cache that only it has filled, a condition on the rank), "
    "and let all ranks do the same"
)
_DO_SAME = {
    "data": _SAME_CODE + "compare the files and samples that {who} reads there, its disk and its CPU load",
    "forward": _SAME_CODE + _COMPUTES,
    "backward": _SAME_CODE + _COMPUTES,
    "other": _SAME_CODE
    + "compare what {who} gets there (larger inputs, a longer list, another file), its disk and its host",
}
DO_PAUSES = {
    "data": "look at what that rank loads in those steps: a new shard or file, a cache that is filled; let workers prefetch it (num_workers)",
    "workers": "look at what its loader's worker does in those steps: it may read or decompress a whole shard, or fill a cache, for longer than the "
    "prefetched batches last; read piece by piece, make shards smaller, or use more workers with their own shards, so that one opens a shard while "
    "another gives batches",
    "validation": "let every rank evaluate a part of the samples in the same step, and add up the counts (all_reduce); or do it less often, or on fewer samples",
    "other": "do it less often, share it among the ranks in the same step, or copy the state and write or upload the copy in a "
    "thread or another process while training goes on",
}
FREEZE = (
    "call `gc.freeze()` once the model and the data are built: collections then leave those objects out; keep a large index in "
    "arrays instead of Python objects"
)
KEEPS = "see what grows there from step to step (a list, a tensor that is concatenated again, hooks that are registered again)"
TOOLS = (
    "switch it off, or let it run for a few steps only (`torch.profiler.schedule(wait, warmup, active, repeat)`, an end that is reached): it "
    "costs time in every step, and a profiler keeps all events until it ends"
)
MORE = "let all ranks accumulate the same number of batches in a step: change it on all together"
LARGER = (
    "give all ranks batches of the same size in the same step: sort or bucket the samples by length over all ranks, or fill each batch up "
    "to a number of tokens"
)
TOGETHER = "`gc.collect()` now and then, at the same step on all ranks"
DO_IN_TURN = {
    "gc": f"let the ranks pause together: {TOGETHER}; {FREEZE}",
    "work": "let all ranks do that work in the same step, so that it costs one pause and not one for each rank; or do it less often",
    "amount": "if every step has that work and only its amount differs (an episode, a document, a sample), give each rank the same number of units "
    "per step (simulator steps, tokens), cut off the longest, or balance them over the ranks; else let all ranks do it in the same step",
}
TOOLS_ON = _row("tools", "all ranks run with {tools} on, still at step {step}", "time in each step, for every operation",
    "switch it off once it has shown what it was on for: `torch.autograd.set_detect_anomaly(False)`, `tracemalloc.stop()`", severity=Severity.INFO)  # fmt: skip
BUSIER = "if steps are meant to have more to do, or the host has got busier, ignore this"
GROWING = _row("growth",
    "steps take longer with time on all ranks: {now_ms:.0f} ms now, {mean_ms:.0f} ms on average so far; {part} of one is {phase} now "
    "({phase_ms:.0f} ms){site}{calls}", "{more:.1f} times the time of an average step", "{do}; " + BUSIER,
    severity=Severity.INFO)  # fmt: skip
OUTSIDE = _row("outside",
    "all ranks spend at least {share:share} of their steps at one line outside forward, backward and the optimizer{site}{longer}", "{share:share} of step time",
    "{do}", severity=Severity.INFO)  # fmt: skip
DO_COLLECT = {
    "by hand": f"call `gc.collect()` at few steps{{instead}}; {FREEZE}",
    "by itself": f"see whether a library calls `gc.collect()` in each step; {FREEZE}; `gc.disable()`, and {TOGETHER}, make them rare",
}
SHARED_LOCK = (
    "ranks wait there for a lock; if they share it (a file lock), one works while the others wait, and more workers would wait, too: read without an "
    "exclusive lock, load what is read once, in `__init__`, or keep a copy for each rank"
)
EXPERTS = (
    "even out what ranks receive there: if a router sends tokens to experts, balance it (a load-balancing loss, a bias per expert, a capacity), or place "
    "the experts so that each rank gets as many; if rows go to shards by a key, hash them by another"
)
DO_ROTATING = {
    "shared": "all ranks wait at that line and compute little, so they may wait for something that they share: a lock across processes (a file, an SQLite "
    "database that each commit locks), a disk, a server: write once per step instead of per value, let one rank write for all, or give each rank "
    "a file of its own",
    "lock": SHARED_LOCK,
    "work": "look for work of varying length on all ranks (input sizes, garbage collection, cron), not for one bad node",
    "line": "all ranks are at that line then: see what makes its work differ from step to step (input sizes, files), not for one bad node",
}


def early(times: int, first: int, whose: str = "its") -> str:
    """Return how many pauses were in the first steps of a job; nothing if none was."""
    return f"; {times} of them in {whose} first {first} steps, which may be warm-up" if times else ""


def found(
    template: Template, s: Snapshot, window: Window, ranks: Collection[int], phase: str, source: Source, doing: str = "",
    **facts: Any,
) -> Finding:  # fmt: skip
    """Return a finding about slow ranks; the first is at the line at which it spends more time than the others.

    Args:
        doing: What it does there, if that is known: a key of the advice.
    """
    first, *more = ranks
    rest = [q for q in window.ranks if q not in ranks]
    r, stack = s.ranks[first], slow_stack(s, window, first, rest, phase)
    facts.setdefault("where", (
        *where_stack(r, stack, "user_code"),
        *(where(s.ranks[q], "user_code", next(iter(stack_of(s.ranks[q], phase)), None)) for q in more),
    ))  # fmt: skip
    no_workers = all(x.workers == 0 for q in ranks for x in s.ranks[q].loaders if x.in_training)
    do = _DO[doing or ("no workers" if phase == "data" and no_workers else phase)]
    theirs = lines_of(s, rest, phase)
    if len(ranks) > len(rest):
        do = _LEFT_OUT.replace("{rest}", rank_list(rest))
    elif stack and theirs and not doing:
        of_own = _OWN + (_OWN_LINE if phase in ("forward", "backward") else do)
        do = _DO_SAME.get(phase, do) if stack[0].key in theirs else of_own
    guard = guard_text(stack, source, GuardKind.HOLDS)
    do = _CAUGHT if guard.startswith("`except") and not doing else do
    own_code = f"{'its' if len(ranks) == 1 else 'their'} own code"
    facts.setdefault("what", f"{_WAITS.get(doing, own_code)} between steps" if phase == "other" else phase)
    return template(
        culprits=sorted(ranks), victims=rest, step=r.step,
        n=len(window.columns), site=stack[0] if stack else None, **facts,
        do=do.format(
            who=rank_list(ranks), clocks="its device clocks and " if s.gpus else "", under=f", and is under {guard}" if guard else "", caught=guard,
            sizes=_SAME_SIZES if _same_sizes(s, ranks) else _SIZES,
        ),
    )  # fmt: skip


def _same_sizes(s: Snapshot, ranks: Collection[int]) -> bool:
    """True if the batches of these ranks have as many elements as the others', on average."""
    sizes = elements(s)
    rest = [n for q, n in sizes.items() if q not in ranks]
    return bool(rest) and 0 < max(sizes[q] for q in ranks) <= 1.05 * statistics.median(rest)


def slow(case: Any) -> Finding:
    """Return the finding of ranks that work longest in most steps, of a case of the rule; the slowest of them is named first."""
    s, window, slow, x = case.snapshot, case.window, case.slow, case.most
    alone, facts = len(slow.ranks) == 1, {"x": x, "slow": slow, "count": len(slow.indices)}
    if case.crowded:
        cores, children = s.ranks[x.rank].cpus, s.ranks[x.rank].workers_busy or 0.0
        own = f"its own {max(1, round(children))} busy child{'ren' if round(children) > 1 else ''}"
        return found(
            CROWDED, s, window, [x.rank], x.phase, case.source, **facts, gain=_gain_text(window, slow, None),
            of="its only core" if len(cores) == 1 else f"its {len(cores)} cores",
            who=own if children >= 0.5 else "other ranks", them="those" if children >= 0.5 else "each rank",
        )  # fmt: skip
    # the tables' `self` includes it, too
    queued_ms = x.queued_ms if x.queued_ms >= 0.1 * x.phase_ms else 0.0
    queued = f" ({queued_ms:.0f} ms of them without a CPU)" if queued_ms else ""
    first = window.steps[x.rank][slow.indices[0]]
    # what makes both passes longer is one finding, of one line, whichever of them is longest now
    both = 2 * x.also_ms >= x.phase_ms > 0.0
    longer_ms = x.phase_ms + queued_ms + both * x.also_ms
    # more CPU time for all, not other code, would save most of it
    gain = (
        ""
        if 2 * queued_ms > longer_ms
        else _NOT_KNOWN
        if case.doing == "queue"
        else _gain_text(window, slow, case.loader_gain)
    )
    phase, what = ("forward", {"what": "forward with backward"}) if both else (x.phase, {})
    return found(
        SLOW, s, window, [x.rank, *(q for q in slow.ranks if q != x.rank)], phase, case.source, **facts, **what, queued=queued,
        longer_ms=longer_ms, gain=gain, doing=case.doing, severity=Severity.INFO if case.doing == "queue" else None,
        cause="host" if phase == "other" else phase, up_to="" if alone else "up to ",
        slower="slowest" if alone else "slower than all of them",
        first_seen_s=first.end_s - first.step_ms / 1e3,
    )  # fmt: skip


def _gain_text(window: Window, slow: Subset, loader_gain: float | None) -> str:
    """Return `; if rank 1 were as fast as the others, a step would take 22 % less (95 % interval …)`."""
    if loader_gain is not None:
        # the others' queues are full: their workers show how fast their loaders are, their steps do not; no step gains more than they wait
        most = min(loader_gain, slow.gain_ms / slow.step_ms)
        return f"; with a loader like the others' a step would take at most {percent(most)} less"
    found = gain(window, slow.ranks)
    if found is None or found.low <= 0:
        return ""
    rest = [q for q in window.ranks if q not in slow.ranks]
    if_equal = f"if {rank_list(slow.ranks)} were as fast as {rank_list(rest) if len(rest) == 1 else 'the others'}"
    interval = f"{percent(found.low).removesuffix(' %')} to {percent(found.high)}"
    return f"; {if_equal}, a step would take {percent(found.share)} less (95 % interval {interval})"


def at_times(case: Any, subset: Subset, severity: Severity) -> Finding:
    """Return the finding of a rank that is slow in every n-th step, or irregularly."""
    s, window, (rank,), slow = case.snapshot, case.window, subset.ranks, set(subset.indices)
    steps = window.steps[rank]

    def excess_ms(phase: str) -> float:
        usual = statistics.median(part_ms(x, phase) for i, x in enumerate(steps) if i not in slow)
        return statistics.median(part_ms(steps[i], phase) for i in subset.indices) - usual

    phase = max(PHASES, key=excess_ms)
    when = f"every {ordinal(subset.period)} step, " if subset.period is not None else ""
    return found(
        AT_TIMES, s, window, [rank], phase, case.source, severity=severity, found=subset, when=when,
        steps="" if when else " steps", cause="host" if phase == "other" else phase,
    )  # fmt: skip


def left_out(s: Snapshot, ranks: Iterable[int], phase: str, site: Site) -> bool:
    """True if these ranks are seen in that phase, never at this line, and have called nothing from it."""
    called = {line for q in ranks for key in s.ranks[q].sites for line in lines_of_key(key)}
    return (site.file, site.line) not in called and bool(lines := lines_of(s, ranks, phase)) and site.key not in lines


def lines_of(s: Snapshot, ranks: Iterable[int], phase: str) -> set[str]:
    """Return the keys of the lines at which these ranks are seen in that phase."""
    return {site.key for q in ranks for site, _ in s.ranks[q].phase_sites.get(phase, ())}


def stack_of(r: RankState, phase: str) -> tuple[Site, ...]:
    """Return the stack with most samples of that phase; `other` also includes phases that the user named.

    Samples from before the first step (`init`) do not count: what is slow comes after it.
    """
    name = max(_names(phase), key=lambda name: sites[0][1] if (sites := r.phase_sites.get(name)) else 0)
    sites = r.phase_sites.get(name)
    return r.phase_stacks.get(name, (sites[0][0],)) if sites else ()


def slow_stack(s: Snapshot, window: Window, rank: int, rest: Sequence[int], phase: str) -> tuple[Site, ...]:
    """Return the stack at the line at which a rank spends more time in that phase than the others, by the largest difference.

    It need not be the line with most samples, at which all ranks may be as long. Of another line the callers are not known.
    """
    most = stack_of(s.ranks[rank], phase)
    own_ms, *theirs = (_ms_by_line(s.ranks[q], window, phase) for q in (rank, *rest[:: max(1, len(rest) // 24)]))
    if not most or not theirs:
        return most
    excess_ms = {site: ms - statistics.median_low(of.get(site, 0.0) for of in theirs) for site, ms in own_ms.items()}
    longest = max(excess_ms, key=lambda site: excess_ms[site])
    mostly = 2 * excess_ms.get(most[0], 0.0) >= sum(ms for ms in excess_ms.values() if ms > 0.0)
    return most if mostly or excess_ms[longest] <= 0.0 else (longest,)


def _ms_by_line(r: RankState, window: Window, phase: str) -> dict[Site, float]:
    """Return the milliseconds per step that a rank spends at each of its most frequent lines of a phase."""
    counts = Counter({site: n for name in _names(phase) for site, n in r.phase_sites.get(name, ())})
    mean_ms = statistics.fmean(part_ms(x, phase) for x in window.steps[r.rank])
    return {site: mean_ms * n / counts.total() for site, n in counts.items()}


def _names(phase: str) -> tuple[str, ...]:
    return ("other", "checkpoint", "validate") if phase == "other" else (phase,)
