"""Judges one incident of the wait-for graph: kind, cause, culprits, and the wait it is about.

Different operations in one collective are a mismatch if the ranks do different things with the same data, and
a deadlock if the ranks are at different points of the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import arguments, call_order, joined
from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.culprit.witnesses import OTHER_PLACE, WEAK, decide
from distdiag.diagnosis.endings import ECHOES, ends
from distdiag.diagnosis.kinds import Kind
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Snapshot
from distdiag.diagnosis.model.syntax import Source, no_source
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.incidents import Incident, Root, find
from distdiag.diagnosis.waits.wait import Wait, call_at

SETTLED_S = 5.0  # seconds without a new call, after which the majority is taken without ranks that have not arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one incident is, and who caused it."""

    case: Case
    kind: Kind
    cause: str
    culprits: tuple[int, ...]
    testimony: Testimony  # what decided
    also: tuple[Testimony, ...]  # what else explains the same culprits

    @property
    def incident(self) -> Incident:
        return self.case.incident

    @property
    def victims(self) -> tuple[int, ...]:
        """The ranks that cannot continue because of the culprits; of a cycle without any, its members."""
        tied = self.incident.root is Root.CYCLE and not self.culprits
        return tuple(sorted((self.incident.members if tied else self.incident.victims) - set(self.culprits)))

    @property
    def wait(self) -> Wait:
        """The wait that the finding is about."""
        return self.case.main(self.culprits)

    @property
    def call(self) -> Call | None:
        """One call in it; of a conflict, the one that the culprits should have made; where roles differ, the culprit's own."""
        own = self.case.own_call(self.culprits[0], self.wait) if self.culprits and not self.wait.conflict else None
        if own is not None:
            return own
        ranks = [r for side in self.wait.sides for r in sorted(side) if r not in self.culprits]
        first = self.case.states.get(self.culprits[0]) if self.culprits else None
        if first is not None:  # in its own role, which has its own lines
            ranks.sort(key=lambda r: self.case.here.get(r) not in first.sites)
        return next((self.wait.calls[r] for r in ranks or self.wait.ranks if r in self.wait.calls), None)

    @property
    def waits(self) -> tuple[Wait, ...]:
        """The waits whose sites the finding lists."""
        if self.incident.root is Root.CONFLICT:
            return (self.wait, *(w for w in self.case.graph.waits if w.ranks))
        return self.incident.waits

    @property
    def reason(self) -> Reason:
        return self.testimony.name

    @property
    def evidence(self) -> tuple[Testimony, ...]:
        """Return what decided, then what else explains it."""
        return (self.testimony, *self.also)


def judge(
    snapshot: Snapshot, graph: WaitGraph, exhausted: Collection[int] = (), source: Source = no_source
) -> list[Verdict]:
    """Return one or more verdicts for every incident of a wait-for graph; `exhausted` as in `Case`."""
    return [v for i in find(graph) for v in judge_incident(Case(snapshot, graph, i, exhausted, source))]


def judge_incident(case: Case) -> list[Verdict]:
    """Return the verdicts on an incident: none while evidence is incomplete, several for several ends."""
    case = _at_other_thread(joined.at_own_call(case))
    incident = case.incident
    if incident.root is Root.GONE:
        return list(_gone(case))
    testimony, also = (Testimony(), ()) if _threads_of_all(case) else decide(case)
    kind, cause, culprits = kinds.MISMATCH, "shape", testimony.ranks
    if incident.root is Root.CONFLICT:
        if _undecided(case, testimony.name):
            return []
        kind, cause = _kind_of_conflict(case, culprits, testimony.name)
    elif incident.root is Root.CYCLE:
        by_message = any(wait.p2p for wait in incident.waits)
        weak = not by_message and testimony.name in WEAK
        turns = call_order.groups_in_turn(case) if weak else None
        mixed = _one_site(incident) if weak else None
        if turns is not None:
            kind, cause, culprits, testimony, also = kinds.DEADLOCK, "group_cycle", (), turns, ()
        elif mixed is not None:
            cause, culprits = "group", mixed
            testimony, also = Testimony(name=Reason.MAJORITY if mixed else Reason.NONE, ranks=mixed), ()
        else:
            kind = kinds.DEADLOCK
            cause = "missing_rank" if culprits else "p2p_cycle" if by_message else "group_cycle"
    return [Verdict(case=case, kind=kind, cause=cause, culprits=culprits, testimony=testimony, also=also)]


# -- ranks with incompatible calls -----------------------------------------------------------------------------------


def _undecided(case: Case, reason: Reason) -> bool:
    """True while ranks that could still change the majority are on their way into the collective."""
    snapshot, graph, wait = case.snapshot, case.graph, case.wait
    if snapshot.source == "dumps" or reason is Reason.EXHAUSTED:
        return False
    coming = [q for q in wait.missing if q not in graph.gone and q not in graph.stuck]
    if not coming:
        return False
    if snapshot.source == "stacks" and reason in (Reason.NONE, Reason.MAJORITY):
        return True  # stacks do not number calls: these ranks may be in different groups, and all wait for one that is still coming
    first, second, *_ = sorted((len(s) for s in wait.sides), reverse=True)
    if first > second + len(coming):
        return False
    since = snapshot.stable_since_s
    return since is None or snapshot.t_s - since < SETTLED_S


def _at_other_thread(case: Case) -> Case:
    """Return a case at the first collective in which a call of one rank's other thread met another call of a main thread.

    From there on the calls of the group pair with the wrong ones, and where they first differ in kind is chance.
    """
    wait = case.wait
    if case.incident.root is not Root.CONFLICT or wait.p2p or not case.states.keys() >= set(case.compared):
        return case
    own = (call for q in case.compared for call in case.states[q].calls if call.group == wait.group)
    for seq in sorted({call.seq for call in own if call.other_thread and call.seq is not None and call.seq < wait.seq}):
        calls = [call_at(case.states[q], wait.group, seq) for q in case.compared]
        known = [call for call in calls if call is not None]
        kinds_of_call = {(compatible.op_name(call.op), compatible.elements(call)) for call in known}
        if len(known) == len(calls) and len({call.other_thread for call in known}) > 1 < len(kinds_of_call):
            cause = "op" if len({op for op, _ in kinds_of_call}) > 1 else "shape"
            return case.at_call(wait.group, seq, lambda _, call: call.other_thread, cause)
    return case


def _threads_of_all(case: Case) -> bool:
    """True if another thread than the main one makes a call of a conflict, and does so on every rank: which came first is chance."""
    calls = {q: call for q, call in case.wait.calls.items() if call.other_thread and q in case.here}
    by_thread = {case.here[q] for q in calls}
    states = [case.states.get(q) for q in case.compared]
    return bool(calls) and all(
        state is not None
        and (by_thread <= state.sites.keys() or any(c.other_thread and c.group == case.wait.group for c in state.calls))
        for state in states
    )


def _kind_of_conflict(case: Case, culprits: tuple[int, ...], reason: Reason) -> tuple[Kind, str]:
    wait, states = case.wait, case.states
    cause = wait.conflict or "op"
    mismatch = missing = kinds.MISMATCH, "op"
    if case.snapshot.source != "dumps":  # which do not show where a rank is now
        missing = kinds.DEADLOCK, "missing_rank"
    if arguments.swapped(case):
        return kinds.DEADLOCK, "order_mismatch"
    if cause != "op" or wait.p2p:
        return kinds.MISMATCH, cause
    if reason in OTHER_PLACE:
        return missing
    here = case.here
    sides = [[r for r in side if r in states] for side in wait.sides]
    if any(not side or any(here[r] is None for r in side) for side in sides) or _same_data(wait):
        return mismatch
    if len({here[r] for side in sides for r in side}) == 1:
        return mismatch
    known = [
        all(here[b] in states[a].sites for a in first for b in second if here[b] != here[a])
        for first, second in (sides[:2], sides[1::-1])
    ]
    if culprits:
        return missing if any(known) else mismatch
    return (kinds.DEADLOCK, "order_mismatch") if all(known) else mismatch


def _same_data(wait: Wait) -> bool:
    """True if both sides are in one function with equal tensors: operations were swapped on one path."""
    calls = [next(wait.calls[r] for r in sorted(side)) for side in wait.sides]
    if any(c.shape is None or c.site is None for c in calls):
        return False
    of = ((c.shape, compatible.dtype_name(c.dtype), c.site and (c.site.file, c.site.function)) for c in calls)
    return len(set(of)) == 1


# -- ranks that are gone or stopped ----------------------------------------------------------------------------------


def _gone(case: Case) -> Iterator[Verdict]:
    """Yield one verdict for the first end that no other end explains, then for what that leaves unexplained."""
    states, ended = case.states, ends(case.snapshot)
    left, victims = set(case.incident.members), set(case.incident.victims)
    while left and victims:
        first = [q for q in left if ended.get(q) not in ECHOES] or sorted(left)
        earliest = min(first, key=lambda q: (states[q].ended_s is None, states[q].ended_s or 0.0, q))
        cause = _cause_of_end(states[earliest])
        named = tuple(sorted(q for q in first if _cause_of_end(states[q]) == cause))
        stuck = (case.graph.victims_of(named) & victims) if left != set(named) else victims
        if stuck:
            waits = tuple(w for w in case.incident.waits if w.missing & set(named))
            part = replace(case, incident=Incident(Root.GONE, frozenset(named), waits, frozenset(stuck)))
            testimony, also = decide(part)
            if testimony.name is Reason.HISTORY:
                cause = "missing_rank"
            culprits = testimony.ranks or named
            yield Verdict(
                case=part, kind=kinds.DEADLOCK, cause=cause, culprits=culprits, testimony=testimony, also=also
            )
        left -= set(named)
        victims -= stuck


def _cause_of_end(state: RankState) -> str:
    if state.life == Life.STOPPED:
        return "rank_stopped"
    if state.life == Life.FINISHED and not state.exit_code:
        return "rank_finished"
    return "rank_exited"


# -- cycles ----------------------------------------------------------------------------------------------------------


def _one_site(incident: Incident) -> tuple[int, ...] | None:
    """Return the minority if one call site used two groups: some ranks were given the other group."""
    if len(incident.waits) != 2:
        return None
    a, b = sorted(incident.waits, key=lambda w: -len(w.ranks))
    sites = {(c.op, c.site) for w in (a, b) for c in w.calls.values()}
    op, site = next(iter(sites))
    if len(sites) != 1 or site is None or a.group == b.group or op == "new_group":
        return None
    return tuple(sorted(b.ranks)) if len(a.ranks) > len(b.ranks) else None
