"""The ranks that work longest in most steps, compared with the rest, and what tells a straggler from a rank that only has less CPU."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from distdiag.diagnosis import comparison
from distdiag.diagnosis.call_cost import Exchange, uneven
from distdiag.diagnosis.comparison import Subset, Veto, leads
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.snapshot import RankState, Site, Snapshot, lines_of
from distdiag.diagnosis.model.syntax import Source, line_at, no_source
from distdiag.diagnosis.pauses import Pauses
from distdiag.diagnosis.replicas import limits as averaged
from distdiag.diagnosis.step_times import LIMITS as STEPS
from distdiag.diagnosis.step_times import PHASES, Window, part_ms, self_ms
from distdiag.diagnosis.text import straggler as text
from distdiag.diagnosis.training_data import LARGER, stages
from distdiag.diagnosis.waits.compatible import op_name
from distdiag.terms.activity import by_line, refined
from distdiag.terms.units import percent


@dataclass(frozen=True)
class Limits:
    recurrence: float = 0.75
    """Share of the window's steps in which the rank is the slowest. Chance gives 1 / ranks."""
    sustained_s: float = 3.0
    """Seconds of steps that are enough, if they are not too few for chance. 30 steps of a fast job take less; of a slow one, minutes."""
    chance: float = 0.005
    """That a rank of equal ones is the slowest in such a share of the steps: as that of two ranks in 30 steps."""
    least_ms: float = 3.0
    """Milliseconds per step that the others would gain. An idle host's jitter is below this."""
    shares: tuple[tuple[float, float], ...] = ((3.0, 0.05), (1.6, 0.15), (1.3, 0.10))
    """(ratio of its slowest phase to the others', share of the step that must then be lost). A
    slower core, or one shared with another job, stretches all computation by some tens of per cent
    and is not the job's fault; extra work or waiting of one rank is many times that of the others.
    The last row needs a host with cores to spare, or a device's clock."""
    starved: float = 0.1
    """Share of the time that a loader's workers were runnable without a CPU; above it they lack
    one."""
    asleep: float = 0.3
    """Cores used by a loader's workers; below it they wait for something other than a CPU."""
    control_ms: float = 0.3
    """Least optimizer time in milliseconds that shows how fast a rank's core is: this work is the
    same on all ranks."""
    jitter_ms: float = 10.0
    """Milliseconds per step that a busy host's jitter may cost a rank at the line of a collective
    call, or by which it may enter its collectives last."""
    queued: float = 0.4
    """Largest time that a rank may wait for a CPU, as a share of the time that it works longer, on a busy host. Above it the rank is not
    accused: it shares its core with other processes, so it also computes more slowly."""
    seen: float = 0.2
    """Share of its excess that a rank on a busy host must compute or sleep, by the kernel's clocks, if it leads for two windows. Healthy ranks
    that share two cores with many other processes have at most 0.1: they differ in when they get a CPU. Ranks with more work had 0.26 at least."""
    mostly: float = 0.5
    """The same, if it leads in one window only. Healthy ranks have up to 0.45 in single polls, as the clocks are read at other times than the
    steps, and lead in turns of up to 100 steps. Ranks with more work mostly had 0.6 at least."""
    concentrated: float = 0.75
    """Share of the rank's excess that is in optimizer.step, on a busy host. Two healthy ranks that
    shared two cores with other work had 0.55; with extra work in optimizer.step it is nearly 1."""
    alone: float = 10.0
    """Ratio of its time for data to the others', from which on they read none: it reads for all."""
    much_larger: float = 2.0
    """How many times as large as any other rank's a rank's batches must be, in nine of ten steps, so that no lack of CPUs need explain its passes."""
    crowded: float = 1.5
    """Processes that want to run per core that a rank is confined to, at least, and as a multiple of the other ranks'."""
    enough: int = 24
    """Most ranks whose median is computed as that of all: more would only cost time."""
    rotating_share: float = 0.35
    """Share of the step that is lost to the slowest rank, if it keeps changing. Two ranks on shared
    cores lose a third by chance."""
    rotating_steps: int = 40
    """Least number of steps that are judged, so that every rank of a small job can be the
    slowest."""
    rotating_changes: float = 0.4
    """Changes of the slowest rank, per step."""
    locked: float = 0.25
    """Share of a phase in which each of the ranks that take turns at a lock waits for it: half of what two ranks wait that do nothing else."""
    pauses: int = 3
    """Least number of pauses of a rank that are summed: one or two may be the start or the end."""
    pauses_ms: float = 4000.0
    """Milliseconds that they must have cost, so that a short job is not judged by a moment."""
    pauses_share: float = 0.15
    """Share of the job's time that is a warning, whoever pauses and whatever for."""
    pauses_info: float = 0.03
    """The same for an info."""


limits = Limits()
HANDING_OUT = ("scatter", "broadcast")
_OTHER_PASS = {"forward": "backward", "backward": "forward"}


def busy(s: Snapshot) -> bool:
    """True if ranks compete for cores, or if that is not known."""
    return s.host_cpu_pct is None or s.host_cpu_pct > STEPS.busy_host_pct


def at_lock(seen: Iterable[Sequence[tuple[Site, int]]], source: Source) -> Site | None:
    """Return the line at which all of these ranks often wait for a lock; they hold it at other times.

    Args:
        seen: The lines of each rank, with the samples of each.
    """
    times: Counter[Site] = Counter()
    for sites in seen:
        locks = {site: n for site, n in sites if by_line(line_at(site, source), idle=True) == "lock"}
        if not locks or sum(locks.values()) < limits.locked * sum(n for _, n in sites):
            return None
        times.update(locks)
    return max(times, key=lambda site: times[site], default=None)


class Excess(NamedTuple):
    """What one slow rank works beyond the others, ms per step, without waiting for a CPU (`queued_ms`)."""

    rank: int
    phase: str  # the one that exceeds the others' most
    phase_ms: float
    all_ms: float
    ratio: float  # of its phase to the others'
    queued_ms: float
    also_ms: float  # of forward or backward, if `phase` is the other of them


def sleeps(r: RankState, window: Window, ms: float) -> bool:
    """True if a rank neither computes nor lacks a CPU for most of so many milliseconds of a step, outside of collectives."""
    waited_ms = statistics.median(x.wait_ms for x in window.steps[r.rank])
    idle_ms = _idle_share(r) * window.step_ms(r.rank) - waited_ms
    return r.cpu_pct is not None and idle_ms >= limits.concentrated * ms


def _idle_share(r: RankState) -> float:
    return 1.0 - (r.cpu_pct or 0.0) / 100 - (r.queued_share or 0.0)


def _load_per_core(s: Snapshot, r: RankState) -> float:
    """Return the processes that want to run on the cores that a rank is confined to, per core; 0 if it is not confined."""
    if not r.cpus:
        return 0.0
    there = (x for x in s.ranks.values() if x.node == r.node and x.cpus and set(x.cpus) <= set(r.cpus))
    return sum(1.0 + (x.workers_busy or 0.0) for x in there) / len(r.cpus)


@dataclass
class Case:
    """The ranks that work longest in most steps, compared with the rest."""

    snapshot: Snapshot
    window: Window
    slow: Subset
    shadows: tuple[int, ...] = ()
    pauses: Pauses = field(default_factory=Pauses)
    source: Source = no_source

    @cached_property
    def rest(self) -> list[int]:
        """The other ranks; enough of them for a median."""
        rest = [q for q in self.window.ranks if q not in self.slow.ranks]
        return rest[:: max(1, len(rest) // limits.enough)]

    @property
    def stage(self) -> bool:
        """True if it is a stage of a pipeline, which may differ from the others in all that it computes, and in when it arrives."""
        return self.stages and self.phase != "data"

    @property
    def busy(self) -> bool:
        return busy(self.snapshot)

    @cached_property
    def stages(self) -> bool:
        return stages(self.snapshot)

    @property
    def count(self) -> int:
        return len(self.slow.indices)

    @property
    def least_ms(self) -> float:
        return max(limits.least_ms, min(share for _, share in limits.shares) * self.slow.step_ms)

    @cached_property
    def at_times(self) -> Subset | None:
        """The only rank with long steps, and those."""
        return comparison.occasional(self.window, limits.recurrence)

    @property
    def small(self) -> bool:
        """True if no rank persists, or the one that does costs little."""
        return self.count < limits.recurrence * len(self.window.columns) or self.slow.gain_ms < self.least_ms

    @cached_property
    def ahead(self) -> tuple[int, float] | None:
        """(rank, ms) of one that always arrives after the others, in whose steps no wait for it is seen.

        Hosts that run ahead until their launch queue is full wait there, in any phase, and not for the last
        to arrive. How far they are ahead is then constant, and is not what a step costs them.
        """
        if not self.window.inferred:
            return None
        steps, ranks = self.window.steps, self.window.ranks
        arrivals = leads(zip(*([x.ready_s or 0.0 for x in steps[q]] for q in ranks), strict=True))
        index, count = Counter(at_top for at_top, _ in arrivals).most_common(1)[0]
        lead_ms = statistics.median(lead_s if at_top == index else -lead_s for at_top, lead_s in arrivals) * 1e3
        always = count >= limits.recurrence * len(arrivals)
        return (ranks[index], lead_ms) if always and lead_ms >= limits.least_ms else None

    @cached_property
    def excesses(self) -> list[Excess]:
        """What each slow rank (enough of them) works beyond the others."""
        # per step, so that no rank is blamed for a step that is slow on all
        rest = list(zip(*(self.window.steps[q] for q in self.rest), strict=True))
        others_ms = [statistics.median_low(map(self_ms, column)) for column in rest]
        usual = {
            phase: statistics.median(statistics.median_low(part_ms(x, phase) for x in column) for column in rest)
            for phase in PHASES
        }
        ranks = self.slow.ranks
        return [self._excess(q, others_ms, usual) for q in ranks[:: max(1, len(ranks) // limits.enough)]]

    def _excess(self, rank: int, others_ms: list[float], usual: dict[str, float]) -> Excess:
        steps, queued_ms = self.window.steps[rank], self._queued_ms(rank)
        excess = {p: statistics.median(part_ms(x, p) for x in steps) - usual[p] for p in PHASES}
        phase = max(PHASES, key=lambda p: excess[p])
        excess[phase] = max(0.0, excess[phase] - queued_ms)
        ratio = (usual[phase] + excess[phase]) / max(usual[phase], 0.1)
        if self.busy and not self.crowded and phase != "optimizer" and usual["optimizer"] > limits.control_ms:
            # optimizer.step computes the same on all ranks: if that takes longer, too, the core is the cause
            ratio /= max(1.0, 1.0 + excess["optimizer"] / usual["optimizer"])
        all_ms = statistics.median(self_ms(x) - ms for x, ms in zip(steps, others_ms, strict=True)) - queued_ms
        if self.stages and phase != "data":
            ratio = 1.0 + all_ms / max(statistics.median(others_ms), 0.1)
        also_ms = excess[_OTHER_PASS[phase]] if phase in _OTHER_PASS else 0.0
        return Excess(rank, phase, excess[phase], all_ms, ratio, queued_ms, also_ms)

    @cached_property
    def crowded(self) -> bool:
        """True if the slow rank shares its few cores with its own children, or with other ranks, and no other rank does.

        What it then waits for a CPU is no load of the host, but of the job.
        """
        ranks = self.snapshot.ranks
        load = _load_per_core(self.snapshot, ranks[self.slow.ranks[0]])
        rest = max(_load_per_core(self.snapshot, ranks[q]) for q in self.rest)
        return len(self.slow.ranks) == 1 and load >= max(limits.crowded, limits.crowded * rest)

    def _queued_ms(self, rank: int) -> float:
        """Return milliseconds per step that a rank waited for a CPU beyond the others, on a busy host.

        One that computes more waits more often, too: by as much as the others wait for what they compute.
        """
        ranks = self.snapshot.ranks
        own, theirs = ranks[rank].queued_share, [r for q in self.rest if (r := ranks[q]).queued_share is not None]
        if self.crowded or own is None or not theirs or not self.busy:
            return 0.0
        usual = statistics.median_low(r.queued_share or 0.0 for r in theirs)
        per_computed = [(r.queued_share or 0.0) / (r.cpu_pct / 100) for r in theirs if r.cpu_pct]
        if per_computed:
            computed = min(1.0, (ranks[rank].cpu_pct or 0.0) / 100)
            usual = max(usual, computed * statistics.median_low(per_computed))
        return max(0.0, own - usual) * self.slow.step_ms

    @cached_property
    def sized(self) -> bool:
        """True if the passes of slow ranks take longer, whose batches are much larger than any other rank's in nearly all steps."""
        both = ([[x.elements for x in self.window.steps[q]] for q in ranks] for ranks in (self.slow.ranks, self.rest))
        own, theirs = (list(zip(*of, strict=True)) for of in both)
        larger = sum(min(x) >= limits.much_larger * max(y) and min(y) > 0 for x, y in zip(own, theirs, strict=True))
        return self.phase in ("forward", "backward") and larger >= 0.9 * len(own)

    @property
    def loaded(self) -> bool:
        """True if the host's load, and nothing of the job, may be why a rank takes longer."""
        return self.busy and not self.crowded and not self.sized

    @cached_property
    def seen(self) -> float:
        """Share of the slowest rank's excess that is CPU time beyond the others', or sleep outside of collectives; 1 if not known."""
        r, rest = self.snapshot.ranks[self.most.rank], [self.snapshot.ranks[q] for q in self.rest]
        if (
            not self.loaded
            or self.window.inferred
            or r.queued_share is None
            or any(x.cpu_pct is None for x in (r, *rest))
        ):
            return 1.0
        computed, usual = ((x or 0.0) / 100 for x in (r.cpu_pct, statistics.median_low(x.cpu_pct or 0.0 for x in rest)))
        # the clocks are read at other times than the steps: the others do not sleep, so what they seem to is the error
        slept_ms = max(0.0, self._slept_ms(r) - abs(statistics.median_low(map(self._slept_ms, rest))))
        return (max(0.0, computed - usual) * self.slow.step_ms + slept_ms) / max(0.1, self.most.all_ms)

    def _slept_ms(self, r: RankState) -> float:
        """Return milliseconds per step in which a rank neither computes nor lacks a CPU, outside of collectives; below 0 by error."""
        steps = self.window.steps[r.rank]
        return _idle_share(r) * statistics.fmean(x.step_ms for x in steps) - statistics.fmean(x.wait_ms for x in steps)

    @property
    def unseen(self) -> bool:
        """True if too little of its excess is seen by the kernel's clocks: if it leads for two windows, less is enough."""
        led = [rank in self.slow.ranks for rank in self.pauses.longest]
        lasting = len(led) == self.pauses.longest.maxlen and sum(led) >= limits.recurrence * len(led)
        return self.seen < (limits.seen if lasting else limits.mostly)

    @cached_property
    def most(self) -> Excess:
        return max(self.excesses, key=lambda x: x.phase_ms)

    @cached_property
    def stack(self) -> tuple[Site, ...]:
        """The line at which the slowest rank spends more time than the others, and its callers if they are known."""
        return text.slow_stack(self.snapshot, self.window, self.most.rank, self.rest, self.phase)

    @cached_property
    def doing(self) -> str:
        """What the slowest rank does between its steps, if its line or its CPU time shows that: queue, lock or idle; or that it hands data out.

        Where it waits for its queue, the others' are filled while they wait for it, however slow their producers are.
        """
        if self.phase == "data" and self.ratio >= limits.alone and 2 * len(self._rooted[1]) >= len(self.window.columns):
            return "hands out"
        if self.phase != "other":
            return ""
        line = line_at(next(iter(self.stack), None), self.source)
        if refined("socket", line) == "queue":
            return "queue"
        idle = sleeps(self.snapshot.ranks[self.most.rank], self.window, self.most.phase_ms)
        return "lock" if by_line(line, idle=True) == "lock" else "idle" if idle else ""

    @property
    def phase(self) -> str:
        return self.most.phase

    @cached_property
    def ratio(self) -> float:
        return min(x.ratio for x in self.excesses)

    @cached_property
    def lost(self) -> float:
        """Share of the step that is lost to each of them, at least."""
        return min(self.slow.gain_ms, *(x.all_ms for x in self.excesses)) / self.slow.step_ms

    @property
    def least_lost(self) -> float:
        return self.needed(self.ratio)

    def needed(self, ratio: float) -> float:
        """Return the share of the step that must be lost, by the ratio to the others' work."""
        shares = limits.shares[:-1] if self.loaded else limits.shares
        share = next((share for factor, share in shares if ratio >= factor), math.inf)
        share = min(share, limits.shares[1][1]) if self.sized else share
        return max(limits.least_ms / self.slow.step_ms, share)

    @cached_property
    def busiest(self) -> float | None:
        """Share of the time in which the busiest of the other ranks' loaders fetches; None if not known."""
        loaders = [x for q in self.rest for x in self.snapshot.ranks[q].loaders if x.in_training and x.workers]
        return max((x.fetching for x in loaders if x.fetching is not None), default=None)

    @cached_property
    def loader_gain(self) -> float | None:
        """Largest share of the step that a loader like the others' would gain; None if not known.

        A rank that waits for another finds its queue full, however slow its own loader is. The time that its
        workers fetch shows the speed: the loader alone would need that share of the step time.
        """
        return None if self.phase != "data" or self.busiest is None else 1.0 - self.busiest

    @property
    def loaders_at_limit(self) -> bool:
        """True if the other ranks' loaders could not go much faster, either."""
        gain, busiest = self.loader_gain, self.busiest
        return gain is not None and gain < self.needed(1.0 / busiest if busiest else math.inf)

    @property
    def lacks_cpu(self) -> bool:
        """True if loader workers of a slow rank wait for a CPU, and have not twice the work of any other's.

        If all loaders are at their limit, a slightly slower one causes all the waiting and fills the other
        queues: their own speed is not known then.
        """
        states = self.snapshot.ranks
        theirs = [states[q].workers_busy for q in self.rest if any(x.workers for x in states[q].loaders)]
        known = [busy for busy in theirs if busy is not None]
        twice = 2 * max(known) if 0 < len(known) == len(theirs) else math.inf

        def starved(r: RankState) -> bool:
            explained = r.workers_busy is not None and not limits.asleep <= r.workers_busy <= twice
            lacking = self.busy or (r.workers_starved or 0.0) > limits.starved
            return any(x.workers for x in r.loaders) and lacking and not explained

        return self.phase == "data" and any(starved(states[q]) for q in self.slow.ranks)

    @property
    def light(self) -> bool:
        """True if most ranks are slow, and not because they get more, or run code that the few others leave out."""
        if 2 * len(self.slow.ranks) <= len(self.window.ranks):
            return False
        left_out = bool(self.stack) and text.left_out(self.snapshot, self.rest, self.phase, self.stack[0])
        more = self.exchange is not None and all(self.exchange.shares[q] >= LARGER for q in self.slow.ranks)
        return not more and (not left_out or self.ratio < limits.shares[0][0])

    @cached_property
    def exchange(self) -> Exchange | None:
        """The all_to_all in which ranks receive unequal parts."""
        return uneven(self.snapshot)

    @property
    def same_code(self) -> bool:
        """True if all ranks run what the slowest spends its time in: a phase of their steps, or a line between them that others are seen at, too."""
        shared = text.lines_of(self.snapshot, self.rest, self.phase)
        return self.phase in ("forward", "backward") or (
            bool(self.stack) and self.stack[0].key in shared and self.phase == "other"
        )

    @property
    def jitters(self) -> bool:
        """True if it spends little time, on a busy host, at a collective call: all ranks make it."""
        sites = self.snapshot.ranks[self.most.rank].phase_sites.get("other", ())
        called = {lines_of(key)[0] for key in self.snapshot.ranks[self.most.rank].sites}
        at_collective = bool(sites) and (sites[0][0].file, sites[0][0].line) in called
        return self.phase == "other" and self.most.phase_ms < limits.jitter_ms and self.busy and at_collective

    @property
    def hands_out(self) -> str:
        """The operation in which one rank hands out what only it reads, if the others wait for it there; empty if they do not.

        They have no such work: the rank is not slower than the others at anything that all do.
        """
        op, waited_ms = self._rooted
        if len(self.slow.ranks) > 1 or 2 * len(waited_ms) < len(self.window.columns):
            return ""
        most = statistics.median(waited_ms) >= limits.concentrated * self.most.all_ms
        return op if most and self.phase in ("other", "data") else ""

    @cached_property
    def _rooted(self) -> tuple[str, list[float]]:
        """(the operation in which the slowest rank hands data out, ms that others waited for it in each); a flag or a metric is no data."""
        rank = self.slow.ranks[0]
        own = (call for call in self.snapshot.ranks[rank].calls if call.root == rank and averaged.is_data(call))
        rooted = {(call.group, call.seq): op for call in own if (op := op_name(call.op)) in HANDING_OUT}
        late = [a for a in self.snapshot.arrivals if a.late_rank == rank]
        waited_ms = {a.seq: a.waited_ms for a in late if (a.group, a.seq) in rooted}
        return next(iter(rooted.values()), ""), list(waited_ms.values())


_SLOW = attrgetter("slow.ranks")
VETOES = (
    Veto(lambda c: c.small and c.ahead,
         "rank {c.ahead[0]} arrives {c.ahead[1]:.0f} ms after the others, in whose steps no wait for it is seen: their hosts may run "
         "ahead and wait for a place in the launch queue of their devices", checked=False),
    Veto(lambda c: c.count < limits.recurrence * len(c.window.columns),
         f"no rank is the slowest in {percent(limits.recurrence)} of the last {{c.window.columns:#}} steps"),
    Veto(lambda c: c.small, "{c.slow.ranks}: costs {c.slow.gain_ms:.1f} ms per step, below {c.least_ms:.1f} ms"),
    Veto(lambda c: not c.stage and not comparison.arrives_last(c.window, c.slow.ranks, limits.recurrence),
         "{c.slow.ranks}: works longest, but does not arrive last, so no rank waits for it"),
    Veto(lambda c: len({x.phase for x in c.excesses}) > 1, "{c.slow.ranks}: each is slow in another phase"),
    Veto(lambda c: c.light, "{c.rest} may only have less to do than the other ranks"),
    Veto(lambda c: c.busy and c.phase == "optimizer" and c.most.phase_ms < limits.concentrated * c.most.all_ms,
         "its optimizer step is only part of its excess: a slower core explains that"),
    Veto(lambda c: c.least_lost == math.inf and 2 * c.most.phase_ms < c.most.all_ms,
         "it works {c.most.all_ms:.0f} ms longer per step, only {c.most.phase_ms:.0f} ms of them in its {c.phase}: a slower core or too few CPUs "
         "explain what all phases share"),
    Veto(lambda c: c.least_lost == math.inf,
         "its {c.phase} takes {c.ratio:.1f} times that of the others, beyond what a slower core or too few CPUs explain"),
    Veto(lambda c: c.lost < c.least_lost, "it costs {c.lost:share} of the step, below {c.least_lost:share}"),
    Veto(lambda c: c.loaded and not c.stage and c.same_code and c.most.queued_ms >= limits.queued * c.most.phase_ms,
         "rank {c.most.rank}: waits {c.most.queued_ms:.0f} ms per step longer for a CPU than the others, on a host whose cores are all in use: it may "
         "only have less of them", undecided=_SLOW),
    Veto(lambda c: c.unseen,
         "rank {c.most.rank}: the host's cores are all in use, and it computes little more than the others: it may only get a CPU later", undecided=_SLOW),
    Veto(lambda c: c.jitters,
         "rank {c.most.rank}: spends its time at a collective call, on a host whose cores are all in use", undecided=_SLOW),
    Veto(lambda c: c.loaders_at_limit,
         "the loaders of the other ranks are busy, too, {c.busiest:share} of the time: none could go much faster"),
    Veto(lambda c: c.lacks_cpu, "the loader workers of {c.slow.ranks} wait for a CPU, as those of all ranks may", undecided=_SLOW),
    Veto(lambda c: c.hands_out,
         "{c.slow.ranks}: the others wait for it in {c.hands_out}, in which it hands out what it alone reads"),
    Veto(lambda c: c.shadows, "{c.shadows} ran out of data and only shadow the collectives"),
)  # fmt: skip


def case_of(facts: Facts, window: Window) -> Case:
    several = not any(r.p2p_issued for r in facts.snapshot.ranks.values())  # the stages of a pipeline differ by design
    slow = comparison.persistent(window, limits.recurrence, limits.least_ms, several)
    return Case(facts.snapshot, window, slow, facts.shadows, facts.pauses, facts.source)
