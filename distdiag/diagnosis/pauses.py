"""Pauses: steps in which one rank kept all others waiting unusually long, and the time after the last one, summed since the warm-up.

Medians hide them: three uploads of five seconds may be half of a job, in steps that nobody calls slow. What is
lost is what counts, whoever may save, validate or upload.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from distdiag.diagnosis.model.snapshot import RankState, Site, Snapshot, Step
from distdiag.diagnosis.step_times import LIMITS, PHASES, part_ms, self_ms

PAUSE_MS = 200.0  # that the others wait in such a step
FACTOR = 3.0  # the same, as a multiple of the usual step
LONG_STEP_S = 5.0  # with the same multiple: a step that holds an evaluation, an export or the like
_WORDS = re.compile(r"[A-Z]?[a-z]+")
_VALIDATION = {
    "validate", "validation", "valid", "val", "eval", "evaluate", "evaluation", "test", "predict", "inference",
}  # fmt: skip


def validates(stack: Iterable[Site]) -> bool:
    """True if a function on the stack is named as one that evaluates a model."""
    return any(word.lower() in _VALIDATION for site in stack for word in _WORDS.findall(site.function))


@dataclass
class Lost:
    """What the pauses of one rank have cost the others."""

    times: int = 0
    ms: float = 0.0
    longest_ms: float = 0.0
    settled_times: int = 0  # of these after the job's first steps (`LIMITS.settled`)
    settled_ms: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)  # ms by the longest phase of each
    stacks: Counter[tuple[Site, ...]] = field(default_factory=Counter)  # polls at which the others waited for it there

    @property
    def phase(self) -> str:
        return self.phases.most_common(1)[0][0]

    @property
    def stack(self) -> tuple[Site, ...]:
        """The stack at the line at which most polls saw the rank; empty if none did.

        A module's `forward` is called again and again: what lasts is what calls it.
        """
        at: Counter[Site] = Counter()
        for stack, n in self.stacks.items():
            at[stack[0]] += n
        most = max(self.stacks, key=lambda stack: (at[stack[0]], self.stacks[stack]), default=())
        return tuple(itertools.dropwhile(lambda site: site.function == "forward", most)) or most

    def plus(self, ms: float, phase: str, settled: bool) -> Lost:
        """Return the same with one more pause; the stacks are shared."""
        return replace(
            self, times=self.times + 1, ms=self.ms + ms, longest_ms=max(self.longest_ms, ms),
            settled_times=self.settled_times + settled, settled_ms=self.settled_ms + settled * ms,
            phases=self.phases + Counter({phase: round(ms)}),
        )  # fmt: skip


@dataclass
class Pauses:
    """The pauses of all ranks so far; follows the snapshots of a job."""

    of: dict[int, Lost] = field(default_factory=dict)  # in steps
    begun_s: float | None = None  # when the first step that is included began
    settled_s: float | None = None  # when the first step after `LIMITS.settled` began
    end_s: float = 0.0
    # (t_s, gc_s, gc_count) after the warm-up
    gc_before: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    # (sum, number) of the shares of time that each rank waited for a CPU, after the warm-up
    queued: dict[int, tuple[float, int]] = field(default_factory=dict)
    long_until_s: float = 0.0  # end of the newest long step, whoever waited in it; now, if a rank is in one
    # the rank that works longest in each of the newest steps, two windows of them; empty with many ranks
    longest: deque[int] = field(default_factory=lambda: deque(maxlen=2 * LIMITS.window))
    _step: int = LIMITS.warm_up  # the newest that is included
    # ms that all others have waited for a rank since then; the next step, if there is one, includes that time
    _after: Counter[int] = field(default_factory=Counter)
    _after_s: float = 0.0  # first arrival of the newest collective that is included
    _least_ms: float = PAUSE_MS  # of a pause

    @property
    def span_s(self) -> float:
        """The job's time from the warm-up to the newest step of all ranks, or collective after it."""
        return 0.0 if self.begun_s is None else self.end_s - self.begun_s

    def lost(self) -> dict[int, Lost]:
        """Return what the pauses of each rank have cost so far, with that since the newest step of all ranks."""
        (rank, ms), (_, other_ms), *_ = *self._after.most_common(2), (-1, 0), (-1, 0)
        if ms - other_ms < self._least_ms:
            return self.of
        return self.of | {rank: self.of.get(rank, Lost()).plus(ms - other_ms, "other", self.settled_s is not None)}

    def share(self, lost: Lost) -> float:
        return lost.ms / 1e3 / self.span_s if self.span_s > 0 else 0.0

    def settled_share(self, *lost: Lost) -> float:
        """Return the share of the time after the job's first steps that these have cost."""
        span_s = 0.0 if self.settled_s is None else self.end_s - self.settled_s
        return sum(x.settled_ms for x in lost) / 1e3 / span_s if span_s > 0 else 0.0

    def waits_for(self, r: RankState) -> None:
        """Note where a rank is while the others wait for it, once the job trains."""
        if r.user_stack and self.begun_s is not None:
            stacks = self.of.setdefault(r.rank, Lost()).stacks
            if r.user_stack in stacks or len(stacks) < 64:
                stacks[r.user_stack] += 1

    def add(self, s: Snapshot) -> None:
        """Add the steps that all ranks have made since the last snapshot."""
        ranks = list(s.ranks.values())
        if len(ranks) < max(2, s.world_size) or any(r.in_join or not r.steps for r in ranks):
            return
        if s.t_s - max(r.steps[-1].end_s for r in ranks) > max(LONG_STEP_S, FACTOR * (s.usual_step_s or 0.0)):
            self.long_until_s = s.t_s
        self._least_ms = max(PAUSE_MS, FACTOR * (s.usual_step_s or 0.0) * 1e3)
        newest = min(r.steps[-1].step for r in ranks)
        self._step = min(self._step, max(newest, LIMITS.warm_up))  # ranks may count from 0 again
        first = max(self._step + 1, newest - len(ranks[0].steps) + 1)
        for step in range(first, newest + 1):
            x = _of(ranks[0], step)
            if x is not None:
                self._add_step(ranks, x)
        if newest > self._step:
            self._step = newest
            self._after.clear()
            for r in ranks:
                total, n = self.queued.get(r.rank, (0.0, 0))
                self.queued[r.rank] = total + (r.queued_share or 0.0), n + 1
        self._add_after(s, min(x.end_s for r in ranks if (x := _of(r, newest)) is not None))
        if not self.gc_before and self.begun_s is not None:
            self.gc_before = {r.rank: (s.t_s, r.gc_s, r.gc_count) for r in ranks}

    def collecting(self, s: Snapshot, rank: int) -> tuple[float, int]:
        """Return (share of the time since the warm-up that a rank spent in full garbage collections, their number)."""
        t_s, gc_s, count = self.gc_before.get(rank, (s.t_s, 0.0, 0))
        r = s.ranks[rank]
        return ((r.gc_s - gc_s) / (s.t_s - t_s), r.gc_count - count) if s.t_s > t_s else (0.0, 0)

    def usually_queued(self, rank: int) -> float:
        """Return the share of its time that a rank has waited for a CPU so far, on average; 0 if that is not known."""
        total, n = self.queued.get(rank, (0.0, 0))
        return total / n if n else 0.0

    def _add_after(self, s: Snapshot, end_s: float) -> None:
        """Add the collectives of all ranks that they have entered since the newest step of all, which ended at `end_s` on the first rank."""
        since_s = max(end_s, self._after_s)
        for a in s.arrivals:
            if a.t_s > since_s and s.whole(a.group) and self.begun_s is not None:
                self._after[a.late_rank] += round(min(a.alone_ms, a.waited_ms))
                self._after_s = max(self._after_s, a.t_s)
                self.end_s = max(self.end_s, a.t_s + a.skew_ms / 1e3)

    def _add_step(self, ranks: list[RankState], x: Step) -> None:
        self.end_s = max(self.end_s, x.end_s)
        begun_s = x.end_s - x.step_ms / 1e3
        self.begun_s = begun_s if self.begun_s is None else self.begun_s
        if self.settled_s is None and x.step > LIMITS.settled:
            self.settled_s = begun_s
        short = x.step_ms < self._least_ms  # a pause is in the step of every rank
        if short and len(ranks) > LIMITS.many_ranks:  # fast path
            return
        if x.step_ms >= max(LONG_STEP_S * 1e3, self._least_ms):
            self.long_until_s = max(self.long_until_s, x.end_s)
        steps = {r.rank: y for r in ranks if (y := _of(r, x.step)) is not None}
        if len(steps) < len(ranks):
            return
        self.longest.append(max(steps, key=lambda q: self_ms(steps[q])))
        if short:
            return
        rank, lost_ms = _kept_waiting(ranks, steps)
        if lost_ms >= self._least_ms:
            phase = max(PHASES, key=lambda phase: part_ms(steps[rank], phase))
            self.of[rank] = self.of.get(rank, Lost()).plus(lost_ms, phase, x.step > LIMITS.settled)


def _of(r: RankState, step: int) -> Step | None:
    at = step - r.steps[0].step
    found = r.steps[at] if 0 <= at < len(r.steps) else None
    if found is not None and found.step == step:
        return found
    return next((x for x in r.steps if x.step == step), None)


def _kept_waiting(ranks: list[RankState], steps: dict[int, Step]) -> tuple[int, float]:
    """Return (the rank that all others waited for in a step, milliseconds that each of them lost).

    On a device no wait is measured: what is lost there is the time from the last but one arrival to the last.
    """
    if not all(r.wait_measured for r in ranks):
        ready = {q: x.ready_s for q, x in steps.items() if x.ready_s is not None}
        *_, before, last = sorted(ready, key=lambda q: ready[q]) if len(ready) == len(steps) else (0, 0)
        return last, (ready[last] - ready[before]) * 1e3 if ready else 0.0
    worked = {q: self_ms(x) for q, x in steps.items()}
    *_, before, last = sorted(worked, key=lambda q: worked[q])
    return last, min(worked[last] - worked[before], *(x.wait_ms for q, x in steps.items() if q != last))
