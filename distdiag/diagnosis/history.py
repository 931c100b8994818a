"""Facts from earlier polls: whether waits and ends are settled, and how long ranks kept the others waiting.

A proof must be the same at two polls between which nothing moved. The cause of an abnormal end is named only after a
moment: the end that caused it may be seen later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from distdiag.diagnosis import endings, kinds
from distdiag.diagnosis.endings import Late
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Finding
from distdiag.diagnosis.model.snapshot import DEAD, Life, Snapshot
from distdiag.diagnosis.pauses import PAUSE_MS, Pauses
from distdiag.diagnosis.waits.delays import kept_waiting
from distdiag.diagnosis.waits.graph import WaitGraph, build
from distdiag.diagnosis.waits.incidents import lock_cycles

SAME_S = 0.2  # minimum between the two polls of a proof: the pulse reads the counters in between
SETTLE_S = 0.4  # after the first end, before its cause is named: another end may come before it in time
ECHO_S = 2.0  # the same, while all ends that are seen are echoes
LATE_S = 5.0  # before the first end: the rank that others waited for then was late


def all_ended(s: Snapshot) -> bool:
    """True if every rank that has reported is gone."""
    return all(r.life in DEAD for r in s.ranks.values())


def _progress(s: Snapshot) -> tuple:
    """Return a value that changes if any rank makes progress: steps, collectives, sites."""
    return tuple(
        (q, r.step, r.phase, r.current_site, tuple(sorted(r.enqueued.items())), tuple(sorted(r.completed.items())))
        for q, r in sorted(s.ranks.items())
    )


def asked_to_end(s: Snapshot) -> bool:
    """True if the launcher got a signal, or Ctrl-C unwinds a rank: where that brings it is no evidence of what it did before."""
    return s.stopped_by is not None or any((r.handling or "").startswith("KeyboardInterrupt") for r in s.ranks.values())


@dataclass
class History:
    """Computes the facts of each poll, from the snapshot and earlier polls.

    Attributes:
        recovered: Longest time in seconds that each rank kept others waiting and let them continue.
    """

    recovered: dict[int, float] = field(default_factory=dict)
    _progress_mark: tuple = ()
    _progress_s: float = 0.0  # since when no rank has made progress
    _mark: tuple = ()
    _mark_s: float = 0.0  # since when it is unchanged
    _lock_mark: tuple = ()
    _stuck_mark: tuple = ()  # the progress of all ranks when ranks were stuck last
    _waiting_mark: tuple = ()  # the same, when ranks waited for a living rank last
    _first_end_s: float | None = None
    _undisturbed_s: float = 0.0  # the last poll at which nothing had asked the ranks to end
    _late: tuple[float, Late] | None = None
    _episodes: dict[int, float] = field(default_factory=dict)
    _pauses: Pauses = field(default_factory=Pauses)

    def facts(
        self, s: Snapshot, source: Callable[[str], str | None], reported: Sequence[Finding], final: bool
    ) -> Facts:
        """Return the facts of this poll. `reported`: open findings."""
        facts = Facts(s, source, reported=tuple(reported), pauses=self._pauses)
        if s.partial and not final:
            facts.ends_settled = facts.waits_settled = False
            return facts
        if (mark := _progress(s)) != self._progress_mark:
            self._progress_mark, self._progress_s = mark, s.t_s
        s = facts.snapshot = replace(s, stable_since_s=self._progress_s)
        graph = facts.graph = build(s)
        self._follow_waits(s, graph)
        self._pauses.add(s)
        waited = not graph.sinks and bool(self._waiting_mark)
        facts.no_progress_since_wait = waited and self._waiting_mark == self._progress_mark
        facts.ends_settled = self._ends_settled(s, facts, final)
        if self._late is not None and self._first_end_s is not None and self._first_end_s - self._late[0] < LATE_S:
            facts.late = self._late[1]
        if asked_to_end(s):
            facts.interrupted_s = self._undisturbed_s
        else:
            self._undisturbed_s = s.t_s
        held = (f for f in facts.reported if kinds.blocks(f) or kinds.of(f).suspends)
        before = tuple(f for f in held if (f.detected_s or 0.0) <= self._undisturbed_s < s.t_s)
        if before and graph.waits:
            facts.waits_settled, facts.repeated = False, before
        else:
            self._settle_waits(s, facts)
        return facts

    def _ends_settled(self, s: Snapshot, facts: Facts, final: bool) -> bool:
        if not facts.ends:
            self._first_end_s = None
            return False
        if any(map(kinds.blocks, facts.reported)):
            return False  # later ends are consequences of it
        if self._first_end_s is None:
            self._first_end_s = s.t_s
        waited_s = s.t_s - self._first_end_s
        only_echoes = all(end in endings.ECHOES for end in facts.ends.values())
        gone = all_ended(s) and waited_s > 0
        return final or gone or waited_s >= (ECHO_S if only_echoes else SETTLE_S)

    def _settle_waits(self, s: Snapshot, facts: Facts) -> None:
        blocked = tuple(f for f in facts.reported if kinds.blocks(f))
        if facts.graph.stuck:
            self._stuck_mark = self._progress_mark
        if blocked and facts.ends:
            facts.waits_settled, facts.repeated = False, blocked  # already proved; the ends of its ranks add nothing
            return
        stuck = ((q, s.ranks[q].life, s.ranks[q].blocked) for q in sorted(facts.graph.stuck))
        mark = tuple((q, b.group, b.seq, b.nth, b.peer, b.entered_s, life) for q, life, b in stuck if b is not None)
        locks = lock_cycles(s, facts.graph)
        same_locks, self._lock_mark = bool(locks) and locks == self._lock_mark, locks
        if same_locks:
            facts.waits_settled, facts.locks = False, locks
            return
        if mark != self._mark:
            self._mark, self._mark_s = mark, s.t_s
            facts.waits_settled = False
        else:
            facts.waits_settled = bool(mark) and s.t_s - self._mark_s >= SAME_S
        if not mark and blocked and self._stuck_mark and self._stuck_mark == self._progress_mark:
            facts.repeated = blocked  # a rank that is being killed no longer sleeps in its call, and has not left it
            return
        died_in_conflict = any(wait.conflict and wait.died for wait in facts.graph.waits)
        if mark and not (facts.waits_settled or died_in_conflict):
            facts.repeated = blocked

    def _follow_waits(self, s: Snapshot, graph: WaitGraph) -> None:
        """Remember whom the others wait for, past its end, and how long each rank typically keeps them waiting."""
        waiting = tuple(sorted(graph.victims_of(graph.sinks))) if graph.sinks else ()
        if waiting:
            self._waiting_mark = self._progress_mark
            self._late = (s.t_s, (tuple(graph.sinks), waiting))
        for rank in graph.sinks:
            kept = kept_waiting(s, graph, rank)
            if kept is not None:
                self._episodes[rank] = max(self._episodes.get(rank, 0.0), kept[1])
                if kept[1] * 1e3 >= PAUSE_MS and rank in s.ranks:  # else its node has not been heard of
                    self._pauses.waits_for(s.ranks[rank])
        for rank in [q for q in self._episodes if q not in graph.sinks]:
            waited_s = self._episodes.pop(rank)
            if s.ranks.get(rank) is not None and s.ranks[rank].life == Life.RUNNING:
                self.recovered[rank] = max(self.recovered.get(rank, 0.0), waited_s)
