"""Speed: who is late in a sustained share of steps, and what all ranks lose to data or communication.

In a synchronous job every rank has the same step time; the slow rank is the one that waits least. So ranks are compared
by `self = step - wait`, each against the median (the lower one) of the others: with two ranks the faster is the reference.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Life, RankState, Site, Snapshot, Step
from distdiag.diagnosis.text.phrases import at, percent, where, where_stack

WINDOW, MIN_STEPS, WARM_UP = 50, 30, 5
MANY_RANKS, WINDOW_OF_MANY = 256, 32  # what is seen in so many ranks needs fewer steps, and a look must stay cheap
RECURRENCE = 0.75  # of the window's steps in which it is the slowest
MIN_MS = 3.0
COMM_SHARE = 0.3
MIN_SPAN_MS = 1000.0  # that collectives of loops without steps must cover
# (its slowest phase against the others' by this factor, then this share of the step must be lost to it). A core that is
# slower than its neighbour, or shared with another job, stretches all computing by some tens of per cent and is no fault of
# the job; work or waiting that only one rank has is many times what the others have.
SHARES = ((3.0, 0.05), (1.6, 0.15))
SHARES_QUIET_HOST = (*SHARES, (1.3, 0.10))
LEAST_SHARE = min(share for _, share in SHARES_QUIET_HOST)
ROTATING_SHARE, ROTATING_MS, ROTATING_STEPS = 0.35, 20.0, 40
BUSY_HOST_PCT = 85.0  # beyond it the ranks compete for the cores, and their jitter says nothing about the job
STARVED = 0.1  # of the time in which a loader's workers could have run: they lack a CPU
ASLEEP = 0.3  # of a core: workers that want less wait for something else
ENOUGH = 24  # ranks, whose median is that of all
CONTROL_MS = 0.3  # of optimizer time, from which on it tells how fast a rank's core is
PHASES = ("data", "forward", "backward", "optimizer", "other")
CAUSES = {"data": "data", "forward": "forward", "backward": "backward", "optimizer": "optimizer", "other": "host"}


def rules(s: Snapshot) -> list[Finding]:
    """Findings about speed."""
    window = _window(s)
    if window is None:
        return _by_arrivals(s) or _shared_waits(s)
    ranks = sorted(window)
    # `self_ms` spelled out: of a thousand ranks the calls alone would take a third of the time
    rows = [[ms if (ms := x.step_ms - x.wait_ms) > 0.0 else 0.0 for x in window[q]] for q in ranks]
    columns = list(zip(*rows, strict=True))
    out = _straggler(s, window, ranks, rows, columns)
    if out and any(keeps_company(window[q]) for q in ranks):
        return []  # the others have run out of data, and know it: that one has some left is no slowness
    if not out:
        out = _rotating(s, window, ranks, columns)
    return out + _shares(s, window)


def keeps_company(steps: Sequence[Step]) -> bool:
    """Whether most of a rank's steps weigh nothing (a loss of exactly 0): it goes along so that the others can meet it."""
    if not steps or steps[-1].loss != 0:
        return False
    return 2 * sum(x.loss == 0 for x in steps) > len(steps)


def _window(s: Snapshot) -> dict[int, list[Step]] | None:
    """The same last steps of every rank, without the first ones of the job; None where they are too few."""
    ranks = [r for r in s.ranks.values() if r.life in (Life.RUNNING, Life.FINISHED)]
    if len(ranks) < 2 or len(ranks) < s.world_size:
        return None
    most = WINDOW if len(ranks) <= MANY_RANKS else WINDOW_OF_MANY
    # mostly every rank has all of its last steps: where they overlap is known from both ends
    if all(r.steps and r.steps[-1].step - r.steps[0].step == len(r.steps) - 1 for r in ranks):
        last = min(r.steps[-1].step for r in ranks)
        first = max(last - most, WARM_UP, *(r.steps[0].step - 1 for r in ranks)) + 1
        if last - first + 1 < MIN_STEPS:
            return None
        return {r.rank: list(r.steps[first - r.steps[0].step : last - r.steps[0].step + 1]) for r in ranks}
    common = set.intersection(*({x.step for x in r.steps if x.step > WARM_UP} for r in ranks))
    steps = sorted(common)[-most:]
    if len(steps) < MIN_STEPS:
        return None
    wanted = set(steps)
    return {r.rank: [x for x in r.steps if x.step in wanted] for r in ranks}


def self_ms(x: Step) -> float:
    return ms if (ms := x.step_ms - x.wait_ms) > 0.0 else 0.0


def part_ms(x: Step, phase: str) -> float:
    """One phase of a step without the waiting in it (which lies in backward, or in the collectives of `other`)."""
    waited = x.wait_ms - x.forward_wait_ms
    if phase == "backward":
        return max(0.0, x.backward_ms - waited)
    if phase == "other":
        return max(0.0, x.other_ms - max(0.0, waited - x.backward_ms))
    return getattr(x, f"{phase}_ms")


def _slowest(ranks: list[int], columns: list[tuple[float, ...]]) -> tuple[list[int], int, list[float]]:
    """([the rank that most often works longest], in how many steps, what others would gain in each if it did not)."""
    slowest: Counter[int] = Counter()
    gains: list[float] = []
    for column in columns:
        top = max(column)
        at_top = column.index(top)
        slowest[ranks[at_top]] += 1
        gains.append(top - max(max(column[:at_top], default=0.0), max(column[at_top + 1 :], default=0.0)))
    q, count = slowest.most_common(1)[0]
    return [q], count, gains


def _slow_together(
    ranks: list[int], rows: list[list[float]], columns: list[tuple[float, ...]]
) -> tuple[list[int], int, list[float]]:
    """The same of several, half of the ranks at most, that all work longer than all the rest: those of a slow node, say."""
    totals = [sum(row) for row in rows]
    order = sorted(range(len(ranks)), key=lambda i: -totals[i])
    k = max(range(2, len(ranks) // 2 + 1), key=lambda k: totals[order[k - 1]] - totals[order[k]], default=0)
    if not k or totals[order[k - 1]] - totals[order[k]] < MIN_MS * len(columns):
        return [], 0, []
    slow, rest = order[:k], order[k:]
    count, gains = 0, []
    for column in columns:
        usual = max(column[i] for i in rest)
        count += min(column[i] for i in slow) > usual
        gains.append(max(column) - usual)
    return sorted(ranks[i] for i in slow), count, gains


def _straggler(
    s: Snapshot, window: dict[int, list[Step]], ranks: list[int], rows: list[list[float]],
    columns: list[tuple[float, ...]],
) -> list[Finding]:  # fmt: skip
    """`rows`, `columns`: `self_ms` of every rank, of every step of the window."""
    n = len(columns)
    slow, count, gains = _slowest(ranks, columns)
    if count < RECURRENCE * n and not any(r.p2p_issued for r in s.ranks.values()):  # stages are not made to be alike
        slow, count, gains = _slow_together(ranks, rows, columns)
    if count < RECURRENCE * n or not slow:
        return []
    gain = statistics.median(gains)
    step_ms = statistics.median(x.step_ms for x in window[slow[0]])
    if gain < max(MIN_MS, LEAST_SHARE * step_ms):
        return []
    among = set(slow)
    if _never_last(window, ranks, among, n):
        return []  # it works longest but does not arrive last: nobody waits for it
    rest = [k for k in ranks if k not in among]
    rest = rest[:: max(1, len(rest) // ENOUGH)]
    others = [
        statistics.median_low([self_ms(window[k][i]) for k in rest]) for i in range(n)
    ]  # per step, so that a slow step of all ranks is nobody's fault
    usual = {
        p: statistics.median(statistics.median_low([part_ms(window[k][i], p) for k in rest]) for i in range(n))
        for p in PHASES
    }
    found = [
        (q, phase, ms)
        for q in slow[:: max(1, len(slow) // ENOUGH)]
        for phase, ms in [_excess(s, window[q], others, usual, gain, step_ms)]
    ]
    q, phase, excess_ms = max(found, key=lambda x: x[2])
    if any(p != phase or not p for _, p, _ in found):
        return []
    busy = _busy(s)
    for r in (s.ranks[k] for k in slow):
        asleep = r.workers_busy is not None and r.workers_busy < ASLEEP
        computing = phase == "data" and any(x.workers for x in r.loaders) and not asleep
        if computing and (busy or (r.workers_starved or 0.0) > STARVED) and not _more_to_load(s, r, rest):
            # Its workers stand in the queue for a CPU. Where all loaders are at their limit, the one that is slower by a
            # little makes all the waiting, and the others' are full because of it: what they could do is not known.
            return []
    r = s.ranks[q]
    stack = _stack_of(r, phase)
    place: Site | None = stack[0] if stack else None
    alone = len(slow) == 1
    whose, up_to = f"{'its' if alone else 'their'} own code between steps", "" if alone else "up to "
    slower = "slowest" if alone else "slower than all of them"
    return [
        Finding(
            kind="straggler",
            cause=CAUSES[phase],
            certainty=Certainty.SUSPECTED,
            severity=Severity.WARNING,
            culprits=tuple(slow),
            victims=tuple(k for k in ranks if k not in among),
            where=(
                *(where_stack(r, stack, "user_code") if stack else (where(r, "user_code"),)),
                *(
                    where(s.ranks[k], "user_code", next(iter(_stack_of(s.ranks[k], phase)), None))
                    for k in slow
                    if k != q
                ),
            ),
            step=r.step,
            message=f"{rank_list(slow)}: {whose if phase == 'other' else phase} {up_to}+{excess_ms:.0f} ms "
            f"per step against the others, {slower} in {count} of the last {n} steps{at(place)}",
            cost=f"{rank_list([k for k in ranks if k not in among])} wait{'s' if len(ranks) == 2 else ''} {gain:.0f} ms per step: "
            f"{percent(gain / step_ms)} of step time",
            advice={
                "data": f"check storage and CPU load for the loader of {rank_list(slow)}; more workers or prefetching",
                "forward": "the same input size on that rank? then check its device clocks and its neighbours on the host",
                "backward": "the same input size on that rank? then check its device clocks and its neighbours on the host",
                "optimizer": "does only that rank do more in optimizer.step (hooks, logging)?",
                "other": "move that work off the training step: to fewer steps, to all ranks in turn, or to a thread",
            }[phase],
        )
    ]


def _never_last(window: dict[int, list[Step]], ranks: list[int], among: set[int], n: int) -> bool:
    """True if a synchronisation of the steps was timed on all ranks, and `among` are usually the last at none of them.

    Ranks leave the first one together (in DDP with buffers, the forward's broadcast): there the last one alone does not
    show who was late.
    """
    timed = 0
    for times in ([[x.arrived_s for x in window[k]] for k in ranks], [[x.ready_s for x in window[k]] for k in ranks]):
        known = [column for column in zip(*times, strict=True) if None not in column]
        if len(known) <= n // 2:
            continue
        timed += 1
        if sum(ranks[column.index(max(column))] in among for column in known) >= RECURRENCE * len(known):
            return False
    return timed > 0


def _more_to_load(s: Snapshot, r: RankState, others: list[int]) -> bool:
    """Whether a rank's loader has more than twice the work of any other's, whatever CPU they get: ranks take their batches in
    step, so that the time for which workers are busy or in the queue for a CPU is their work for as many batches."""
    busy = [s.ranks[k].workers_busy for k in others if any(x.workers for x in s.ranks[k].loaders)]
    known = [x for x in busy if x is not None]
    return r.workers_busy is not None and 0 < len(known) == len(busy) and r.workers_busy > 2 * max(known)


def _busy(s: Snapshot) -> bool:
    return s.host_cpu_pct is None or s.host_cpu_pct > BUSY_HOST_PCT


def _excess(
    s: Snapshot, steps: list[Step], others: list[float], usual: dict[str, float], gain: float, step_ms: float
) -> tuple[str, float]:
    """(phase in which one rank takes longer than usual, by how many ms); no phase where that is too little to tell.

    Args:
        steps: Of that rank.
        others: `self_ms` that is usual for the others, by step.
        usual: Milliseconds that are usual for them, by phase.
        gain: What they would gain, in milliseconds a step.
        step_ms: A step.
    """
    excess = statistics.median(self_ms(x) - b for x, b in zip(steps, others, strict=True))
    excesses = {p: statistics.median(part_ms(x, p) for x in steps) - usual[p] for p in PHASES}
    phase = max(PHASES, key=lambda p: excesses[p])
    ratio = (usual[phase] + excesses[phase]) / max(usual[phase], 0.1)
    busy = _busy(s)
    if busy and phase != "optimizer" and usual["optimizer"] > CONTROL_MS:
        # what it computes in optimizer.step is the same on all ranks: where that takes longer, too, the core is the cause
        ratio /= max(1.0, 1.0 + excesses["optimizer"] / usual["optimizer"])
    needed = [share for factor, share in (SHARES if busy else SHARES_QUIET_HOST) if ratio >= factor]
    if not needed or min(gain, excess) < max(MIN_MS, needed[0] * step_ms):
        return "", 0.0
    return phase, excesses[phase]


def _stack_of(r: RankState, phase: str) -> tuple[Site, ...]:
    """Where samples of that phase fell most; `other` also shows as optimizer's neighbourhood or user-named phases."""
    names = ("other", "checkpoint", "validate", "init") if phase == "other" else (phase,)
    best: tuple[Site, ...] = ()
    most = 0
    for name in names:
        places = r.phase_places.get(name, ())
        if places and places[0][1] > most:
            most = places[0][1]
            best = r.phase_stacks.get(name, (places[0][0],))
    return best


def _rotating(
    s: Snapshot, window: dict[int, list[Step]], ranks: list[int], columns: list[tuple[float, ...]]
) -> list[Finding]:
    n = len(columns)
    if n < ROTATING_STEPS:
        return []
    tops = [column.index(max(column)) for column in columns]
    slowest = [ranks[at_top] for at_top in tops]
    changes = sum(a != b for a, b in itertools.pairwise(slowest))
    # of many ranks not every one has its turn in so few steps: most of those that chance alone would pick
    by_chance = len(ranks) * (1 - (1 - 1 / len(ranks)) ** n)
    enough = len(ranks) if len(ranks) <= 8 else 0.75 * by_chance
    if Counter(slowest).most_common(1)[0][1] > 0.6 * n or len(set(slowest)) < enough or changes < 0.4 * n:
        return []
    skew = statistics.median(
        column[i] - statistics.median_low(column[:i] + column[i + 1 :]) for column, i in zip(columns, tops, strict=True)
    )
    step_ms = statistics.median(x.step_ms for x in window[ranks[0]])
    if skew < max(ROTATING_MS, ROTATING_SHARE * step_ms):
        return []
    phase = max(
        PHASES,
        key=lambda p: statistics.median(
            max(part_ms(window[q][i], p) for q in ranks) - min(part_ms(window[q][i], p) for q in ranks)
            for i in range(n)
        ),
    )
    excess = [
        part_ms(window[slowest[i]][i], phase)
        / max(0.1, statistics.median_low([part_ms(window[q][i], phase) for q in ranks if q != slowest[i]]))
        for i in range(n)
    ]
    if statistics.median(excess) < (3.0 if _busy(s) else 1.5):
        return []
    return [
        Finding(
            kind="straggler",
            cause="rotating",
            certainty=Certainty.SUSPECTED,
            severity=Severity.WARNING,
            victims=tuple(ranks),
            where=tuple(where(s.ranks[q], None, (_stack_of(s.ranks[q], phase) or (None,))[0]) for q in ranks),
            step=s.ranks[ranks[0]].step,
            message=f"no single rank: the slowest changed {changes} times in {n} steps, skew p50 {skew:.0f} ms, "
            f"mostly in {'code between steps' if phase == 'other' else phase}",
            cost=f"{percent(skew / step_ms)} of step time is waiting for whoever is slow",
            advice="look for work of varying length on all ranks (input sizes, garbage collection, cron), not for one bad node",
        )
    ]


def _shares(s: Snapshot, window: dict[int, list[Step]]) -> list[Finding]:
    """The share of step time that every rank loses to its data, or to communication without a late rank."""
    some = next(iter(window.values()))  # where one rank loses neither, the least of all ranks is below both bounds
    whole = sum(x.step_ms for x in some)
    if sum(x.data_ms for x in some) < 0.3 * whole and sum(x.wait_ms for x in some) < COMM_SHARE * whole:
        return []
    total = {q: sum(x.step_ms for x in xs) for q, xs in window.items()}
    if min(total.values()) <= 0:
        return []
    data = min(sum(x.data_ms for x in xs) / total[q] for q, xs in window.items())
    wait = min(sum(x.wait_ms for x in xs) / total[q] for q, xs in window.items())
    out = []
    if data >= 0.3:
        ms = statistics.median(x.data_ms for xs in window.values() for x in xs)
        place = next((x.site for r in s.ranks.values() for x in r.loaders if x.in_training), None)
        workers = next((x.workers for r in s.ranks.values() for x in r.loaders if x.in_training), 0)
        out.append(
            Finding(
                kind="input_bound",
                certainty=Certainty.PROVED,
                severity=Severity.INFO,
                victims=tuple(sorted(window)),
                where=tuple(where(s.ranks[q], "data", place) for q in sorted(window)),
                message=f"every rank waits for data: {percent(data)} of step time (p50 {ms:.0f} ms){at(place)}",
                cost=f"up to {percent(data)} of step time",
                advice=f"raise num_workers (now {workers}) or prefetch_factor; `distdiag probe dataloader` finds the setting",
            )
        )
    if wait >= COMM_SHARE:
        out.append(_comm_bound(sorted(window), wait, "step time"))
    return out


def _comm_bound(ranks: list[int], share: float, of: str) -> Finding:
    return Finding(
        kind="comm_bound",
        certainty=Certainty.SUSPECTED,
        severity=Severity.INFO,
        victims=tuple(ranks),
        message=f"exposed communication: at least {percent(share)} of {of} on every rank, with no rank late",
        cost=f"{percent(share)} of {of}",
        advice="`distdiag probe allreduce` says what this machine can do; synchronise less often, or in larger pieces",
    )


def _shared_waits(s: Snapshot) -> list[Finding]:
    """Loops without an optimizer: the share of time that every rank's host waits in the collectives of all ranks."""
    whole = {name for name, g in s.groups.items() if len(g.ranks) == s.world_size}
    recent = [a for a in s.arrivals if a.group in whole]
    if len(recent) < MIN_STEPS or s.world_size < 2:
        return []
    span_ms = (recent[-1].t_s - recent[0].t_s) * 1e3
    share = sum(a.shared_ms for a in recent[:-1]) / span_ms if span_ms > MIN_SPAN_MS else 0.0
    return [_comm_bound(sorted(s.ranks), min(share, 1.0), "the time")] if share >= COMM_SHARE else []


def _by_arrivals(s: Snapshot) -> list[Finding]:
    """Loops without an optimizer: who enters the collectives last, by how much of the time between them."""
    by_group: dict[str, list] = {}
    for a in s.arrivals:
        if a.op in (
            "all_reduce",
            "barrier",
            "all_gather",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_to_all",
        ):
            g = s.groups.get(a.group)
            if g is not None and len(g.ranks) == s.world_size:
                by_group.setdefault(a.group, []).append(a)
    for arrivals in by_group.values():
        recent = arrivals[-60:]
        if len(recent) < MIN_STEPS:
            continue
        late = Counter(a.late_rank for a in recent)
        q, count = late.most_common(1)[0]
        # an asynchronous operation may be entered late and cost nobody anything
        skew = statistics.median(min(a.skew_ms, a.waited_ms) for a in recent)
        period = (recent[-1].t_s - recent[0].t_s) * 1e3 / (len(recent) - 1)
        if count < RECURRENCE * len(recent) or skew < max(3.0, 0.15 * period) or q not in s.ranks:
            continue
        r = s.ranks[q]
        stack = max(r.phase_stacks.values(), key=len, default=r.user_stack)
        for name in ("other", "init"):
            if r.phase_places.get(name):
                stack = r.phase_stacks[name]
                break
        return [
            Finding(
                kind="straggler",
                cause="host",
                certainty=Certainty.SUSPECTED,
                severity=Severity.WARNING,
                culprits=(q,),
                victims=tuple(k for k in sorted(s.ranks) if k != q),
                where=where_stack(r, stack) if stack else (where(r),),
                message=f"rank {q} enters {recent[-1].op} last in {count} of the last {len(recent)}, "
                f"{skew:.0f} ms after the first{at(stack[0] if stack else None)}",
                cost=f"the others wait {skew:.0f} ms of every {period:.0f} ms",
                advice=f"look at what rank {q} does between its collectives that the others do not",
            )
        ]
    return []
