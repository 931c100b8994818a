"""Judges one incident of the wait-for graph: kind, cause, culprits, and the wait it is about.

Different operations in one collective are a mismatch if the ranks do different things with the same data, and a deadlock
if the ranks are at different points of the program.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit.case import Case, Reason, Testimony, site_of
from distdiag.diagnosis.culprit.witnesses import OTHER_PLACE, WEAK, decide
from distdiag.diagnosis.endings import ECHOES, ends
from distdiag.diagnosis.kinds import Kind
from distdiag.diagnosis.model.guards import Source
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Snapshot
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.incidents import Incident, Root, find
from distdiag.diagnosis.waits.wait import Wait

SETTLED_S = 5.0  # seconds without a new call, after which the majority is taken without ranks that have not arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one incident is, and who caused it."""

    kind: Kind
    cause: str
    incident: Incident
    culprits: tuple[int, ...]
    victims: tuple[int, ...]
    testimony: Testimony  # what decided
    also: tuple[Testimony, ...] = ()  # what else explains the same culprits
    wait: Wait  # the one the finding is about
    call: Call | None  # one call in it
    waits: tuple[Wait, ...]  # waits whose sites the finding lists
    ended: tuple[int, ...] = ()  # ranks that are gone or stopped
    stuck: tuple[int, ...] = ()  # ranks that cannot continue because of them

    @property
    def reason(self) -> Reason:
        return self.testimony.name

    @property
    def evidence(self) -> tuple[Testimony, ...]:
        """Return what decided, then what else explains it."""
        return (self.testimony, *self.also)


def judge(
    snapshot: Snapshot,
    graph: WaitGraph,
    exhausted: Collection[int] = (),
    source: Source | None = None,
    without: Collection[str] = (),
) -> list[Verdict]:
    """Return one or more verdicts for every incident of a wait-for graph.

    Args:
        exhausted: Ranks that ran out of batches while others have some left.
        source: Text of a source file by path, or None: conditions on the rank are read from it.
        without: Witnesses that are not asked.
    """
    found = (judge_incident(snapshot, graph, i, exhausted, source, without) for i in find(graph))
    return [verdict for verdicts in found for verdict in verdicts]


def judge_incident(
    snapshot: Snapshot,
    graph: WaitGraph,
    incident: Incident,
    exhausted: Collection[int] = (),
    source: Source | None = None,
    without: Collection[str] = (),
) -> list[Verdict]:
    """Return the verdict on an incident; nothing while evidence is incomplete, several if ranks ended for different reasons."""
    if incident.root is Root.GONE:
        return _gone(Case(snapshot, graph, incident, exhausted, source), without)
    case = Case(snapshot, graph, incident, exhausted, source)
    if incident.root is Root.ABORT:
        return [_aborted(case, without)]
    found = _conflict(case, without) if incident.root is Root.CONFLICT else _cycle(case, without)
    return [] if found is None else [found]


def _conflict(case: Case, without: Collection[str]) -> Verdict | None:
    wait = case.wait
    testimony, also = decide(case, without)
    culprits, reason = testimony.ranks, testimony.name
    if _undecided(case, reason):
        return None
    kind, cause = _kind_of_conflict(case, culprits, reason)
    return Verdict(
        kind=kind,
        cause=cause,
        incident=case.incident,
        culprits=culprits,
        victims=tuple(sorted(case.incident.victims - set(culprits))),
        testimony=testimony,
        also=also,
        wait=wait,
        call=next((wait.calls[r] for side in wait.sides for r in sorted(side) if r not in culprits), None),
        waits=(wait, *(w for w in case.graph.waits if w.ranks)),
    )


def _undecided(case: Case, reason: Reason) -> bool:
    """True while ranks that could still change the majority are on their way into the collective."""
    snapshot, graph, wait = case.snapshot, case.graph, case.wait
    if snapshot.source == "dumps" or reason is Reason.EXHAUSTED:
        return False
    coming = [q for q in wait.missing if q not in graph.gone and q not in graph.stuck]
    if not coming:
        return False
    first, second, *_ = sorted((len(s) for s in wait.sides), reverse=True)
    if first > second + len(coming):
        return False
    since = snapshot.stable_since_s
    return since is None or snapshot.t_s - since < SETTLED_S


def _kind_of_conflict(case: Case, culprits: tuple[int, ...], reason: Reason) -> tuple[Kind, str]:
    wait, states = case.wait, case.states
    cause = wait.conflict or "op"
    mismatch, missing = (kinds.MISMATCH, "op"), (kinds.DEADLOCK, "missing_rank")
    if cause != "op" or wait.p2p:
        return kinds.MISMATCH, cause
    if reason in OTHER_PLACE:
        return missing
    here = {r: site_of(states.get(r), c) for r, c in wait.calls.items()}
    sides = [[r for r in side if r in states] for side in wait.sides]
    if any(not side or any(here[r] is None for r in side) for side in sides) or _same_data(wait):
        return mismatch
    known = [
        all(here[b] in states[a].sites for a in sides[i] for b in sides[j] if here[b] != here[a])
        for i, j in ((0, 1), (1, 0))
    ]
    if len({here[r] for side in sides for r in side}) == 1:
        return mismatch
    if culprits:
        return missing if any(known) else mismatch
    return (kinds.DEADLOCK, "order_mismatch") if all(known) else mismatch


def _same_data(wait: Wait) -> bool:
    """True if both sides are in one function with equal tensors: operations were swapped, and the program's path is the same."""
    calls = [next(wait.calls[r] for r in sorted(side)) for side in wait.sides]
    first = calls[0]
    return all(
        c.shape is not None
        and c.shape == first.shape
        and compatible.dtype_name(c.dtype) == compatible.dtype_name(first.dtype)
        and c.site is not None
        and first.site is not None
        and (c.site.file, c.site.function) == (first.site.file, first.site.function)
        for c in calls
    )


# -- ranks that the backend aborted ----------------------------------------------------------------------------------


def _aborted(case: Case, without: Collection[str]) -> Verdict:
    testimony, also = decide(case, without)
    return Verdict(
        kind=kinds.MISMATCH,
        cause="shape",
        incident=case.incident,
        culprits=testimony.ranks,
        victims=tuple(sorted(case.incident.members - set(testimony.ranks))),
        testimony=testimony,
        also=also,
        wait=case.wait,
        call=None,
        waits=(),
    )


# -- ranks that are gone or stopped ----------------------------------------------------------------------------------


def _gone(case: Case, without: Collection[str]) -> list[Verdict]:
    """Return one verdict for the first end that no other end explains, then for what that leaves unexplained."""
    states, ended, graph, incident = case.states, ends(case.snapshot), case.graph, case.incident
    out: list[Verdict] = []
    left, victims = set(incident.members), set(incident.victims)
    while left and victims:
        first = [q for q in left if ended.get(q) not in ECHOES] or sorted(left)
        earliest = min(first, key=lambda q: (states[q].ended_s is None, states[q].ended_s or 0.0, q))
        cause = _cause_of_end(states[earliest])
        named = tuple(sorted(q for q in first if _cause_of_end(states[q]) == cause))
        stuck = (graph.victims_of(named) & victims) if left != set(named) else victims
        if stuck:
            out.append(_ended(replace(case, ended=named), cause, sorted(stuck), without))
        left -= set(named)
        victims -= stuck
    return out


def _ended(case: Case, cause: str, stuck: list[int], without: Collection[str]) -> Verdict:
    waits = tuple(w for w in case.incident.waits if w.missing & set(case.ended))
    case = replace(case, waits=waits, stuck=frozenset(stuck))
    wait = next((w for w in waits if not w.p2p), waits[0])
    testimony, also = decide(case, without)
    culprits, reason = testimony.ranks, testimony.name
    return Verdict(
        kind=kinds.DEADLOCK,
        cause="missing_rank" if reason is Reason.HISTORY else cause,
        incident=case.incident,
        culprits=culprits or case.ended,
        victims=tuple(sorted(set(stuck) - set(culprits or case.ended))),
        testimony=testimony,
        also=also,
        wait=wait,
        call=next((wait.calls[r] for r in wait.ranks if r in wait.calls), None),
        waits=waits,
        ended=case.ended,
        stuck=tuple(stuck),
    )


def _cause_of_end(state: RankState) -> str:
    if state.life == Life.STOPPED:
        return "rank_stopped"
    if state.life == Life.FINISHED and not state.exit_code:
        return "rank_finished"
    return "rank_exited"


# -- cycles ----------------------------------------------------------------------------------------------------------


def _cycle(case: Case, without: Collection[str]) -> Verdict:
    incident = case.incident
    testimony, also = decide(case, without)
    culprits, reason = testimony.ranks, testimony.name
    by_message = any(w.p2p for w in incident.waits)
    kind, cause = kinds.DEADLOCK, "p2p_cycle" if by_message else "group_cycle"
    mixed = None if by_message or reason not in WEAK else _one_site(incident)
    if mixed is not None:
        kind, cause, culprits = kinds.MISMATCH, "group", mixed
        testimony, also = Testimony(name=Reason.MAJORITY if mixed else Reason.NONE, ranks=mixed), ()
    elif culprits:
        cause = "missing_rank"
    victims = incident.victims if culprits else incident.members
    main = case.main(culprits)
    return Verdict(
        kind=kind,
        cause=cause,
        incident=incident,
        culprits=culprits,
        victims=tuple(sorted(victims - set(culprits))),
        testimony=testimony,
        also=also,
        wait=main,
        call=next((main.calls[r] for r in main.ranks if r in main.calls), None),
        waits=incident.waits,
    )


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
