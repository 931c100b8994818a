"""Witnesses: the declared order in which evidence decides who is the culprit of an incident.

A witness is one kind of evidence: a function that applies to some incidents and may name ranks as culprits. They are asked in
order, and the first that names a rank decides. If none does, it is a true tie: no rank is blamed, and all members are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from distdiag.diagnosis.culprit import (
    arguments,
    call_order,
    call_site,
    callers,
    extra_backward,
    message_counts,
    parting,
    pending_exception,
    rhythm,
    skipped,
)
from distdiag.diagnosis.culprit.parting import Condition
from distdiag.diagnosis.model.guards import Source
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Site, Snapshot
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.incidents import Incident, Root
from distdiag.diagnosis.waits.wait import Wait


class Reason(StrEnum):
    """Name of the witness that decided; NONE is a true tie."""

    EXHAUSTED = "exhausted"  # it ran out of batches
    MAJORITY = "majority"  # fewer ranks than on the other side
    EXCEPTION = "exception"  # it is handling an exception that the others do not have
    ARGUMENT = "argument"  # its dtype, size, root or peer is new at its site
    SKIPPED = "skipped"  # it ran a forward without its backward
    EXTRA = "extra"  # it made more backward passes than steps
    SITE = "site"  # it is at a site that the others never used
    GROUP_SITE = "group_site"  # it is the first to use this group at its site
    HISTORY = "history"  # it has used a site that the others never used
    RHYTHM = "rhythm"  # it arrived earlier than ever, or is missing at a site (see `rhythm`)
    CONDITION = "condition"  # only its call is under a condition on the rank
    PATTERN = "pattern"  # it broke the order of its own calls
    MESSAGES = "messages"  # it has sent fewer messages than its peers
    COUNT = "count"  # it has used a site more, or less, often than all others
    ALONE = "alone"  # it waits alone, the others together
    DUE = "due"  # it is not in the call that always followed its preceding calls
    NONE = "none"


@dataclass(frozen=True)
class Case:
    """One incident, as input of the witnesses."""

    snapshot: Snapshot
    graph: WaitGraph
    incident: Incident
    exhausted: Collection[int] = ()  # ranks that ran out of batches while others have some left
    source: Source | None = None
    ended: tuple[int, ...] = ()  # if ranks are gone: those that ended
    waits: tuple[Wait, ...] = ()  # if ranks are gone: the waits for them
    stuck: frozenset[int] = frozenset()  # if ranks are gone: the ranks that cannot continue because of them

    @property
    def states(self) -> dict[int, RankState]:
        return self.snapshot.ranks

    @property
    def wait(self) -> Wait:
        return self.incident.waits[0]

    @cached_property
    def sides(self) -> list[list[int]]:
        """Return the ranks with equal calls in a conflict, the largest side first."""
        return [sorted(side) for side in self.wait.sides]

    @cached_property
    def calls(self) -> dict[int, Call | None]:
        return {r: w.calls.get(r) for w in self.incident.waits for r in (w.calls if w.conflict else w.ranks)}

    @cached_property
    def here(self) -> dict[int, str | None]:
        """Site of each member's call."""
        members = [r for s in self.sides for r in s] if self.incident.root is Root.CONFLICT else self.incident.members
        return {r: call_site.site_of(self.states.get(r), self.calls.get(r)) for r in members}


class Witness(NamedTuple):
    """One kind of evidence: when it applies, and whom it names."""

    name: Reason
    applies: Callable[[Case], bool]
    testify: Callable[[Case], Collection[int]]


# -- when a witness applies ------------------------------------------------------------------------------------------


def _always(_: Case) -> bool:
    return True


def _tie(case: Case) -> bool:
    """True for two sides of equal size, if the history of every rank is known."""
    return len(case.sides) == 2 and all(r in case.states for side in case.sides for r in side)


def _ended_normally(case: Case) -> bool:
    """True if one rank waits for ranks that all ended normally, and all other stuck ranks wait for that one."""
    waiting = _waiting_for_ended(case)
    normally = all(case.states[q].life == Life.FINISHED and not case.states[q].exit_code for q in case.ended)
    return len(waiting) == 1 and normally and set(case.stuck) <= case.graph.victims_of(waiting) | set(waiting)


# -- whom a witness names --------------------------------------------------------------------------------------------


def _out_of(ranks: Collection[int], exhausted: Collection[int]) -> tuple[int, ...]:
    """Return those of `ranks` that ran out of batches, if not all did."""
    out = tuple(sorted(set(ranks) & set(exhausted)))
    return out if len(out) < len(ranks) else ()


def _exhausted(case: Case) -> Collection[int]:
    match case.incident.root:
        case Root.CONFLICT:
            return _out_of(frozenset().union(*case.wait.sides), case.exhausted)
        case Root.GONE:
            return _out_of({*case.ended, *_waiting_for_ended(case)}, case.exhausted)
    return _out_of(case.incident.members, case.exhausted)


def _waiting_for_ended(case: Case) -> list[int]:
    return sorted({r for w in case.waits if not w.p2p for r in w.ranks} & set(case.stuck))


def _minority(case: Case) -> Collection[int]:
    first, second, *_ = case.sides
    return [r for side in case.sides[1:] for r in side] if len(first) > len(second) else ()


def _one_side(test: Callable[..., bool]) -> Callable[[Case], Collection[int]]:
    """Return a witness that names one side of a tie if `test` is true of that side only."""

    def names(case: Case) -> Collection[int]:
        first, second = case.sides
        a, b = test(case.states, case.here, first, second), test(case.states, case.here, second, first)
        return () if a == b else first if a else second

    return names


def _skipped(case: Case) -> Collection[int]:
    found = skipped.skipped(case.snapshot, [r for side in case.sides for r in side])
    return () if found is None else next((s for s in case.sides if s == [found.rank]), ())


def _extra(case: Case) -> Collection[int]:
    found = extra_backward.extra_backward(case.snapshot, [r for side in case.sides for r in side])
    return () if found is None else next((s for s in case.sides if s == [found.rank]), ())


def _first_in_group(case: Case) -> Collection[int]:
    return next((s for s in case.sides if call_site.odd_in_group(case.states, case.wait, case.here, s)), ())


def _rhythm(case: Case) -> Collection[int]:
    odd = rhythm.rhythm_of(case.snapshot, case.wait)
    return () if odd is None else odd.ranks


def _condition(case: Case) -> Collection[int]:
    behind = condition_of(case.snapshot, case.wait, case.source)
    return () if behind is None else behind[0]


def _historic_waiter(case: Case) -> Collection[int]:
    """Return the only rank that waits for ended ranks, if it has made calls that those never made."""
    waiting = _waiting_for_ended(case)
    here = {r: call_site.site_of(case.states[r], case.states[r].blocked) for r in waiting}
    return waiting if call_site.odd_by_history(case.states, here, waiting, case.ended) else ()


def _departed(case: Case) -> Collection[int]:
    members = sorted(case.incident.members)
    others = (state for rank, state in case.states.items() if rank not in case.incident.members)
    departed = call_order.departed((case.states[r] for r in members), others)
    return () if departed is None else (departed,)


def _with_exception(case: Case) -> Collection[int]:
    return pending_exception.side_with_exception(case.states, [[r] for r in sorted(case.incident.members)])


def _collectives_only(case: Case) -> bool:
    """True if no rank waits for a message. The number of messages in a step depends on its data (micro-batches): none is due."""
    return not any(w.p2p for w in case.incident.waits)


def _not_in_due_call(case: Case) -> Collection[int]:
    rank = call_order.not_in_due_call(case.states[r] for r in sorted(case.incident.members))
    return () if rank is None else (rank,)


def _new_site_in_cycle(case: Case) -> Collection[int]:
    """Return the one member at a site that no other member has used.

    An end of a message must be there for the first time: sends and receives have different sites in every program.
    """
    states, members = case.states, sorted(case.incident.members)
    known_to = Counter(site for r in members for site in states[r].sites)
    alone = [r for r in members if known_to.get(case.here[r] or "", 0) <= 1]  # a ring may have thousands of members
    if len(alone) != 1:
        return ()
    (rank,) = alone
    call = case.calls.get(rank)
    if call is not None and call.p2p and states[rank].sites.get(case.here[rank] or "", 0) > 1:
        return ()
    return alone if call_site.odd_by_site(states, case.here, alone, [r for r in members if r != rank]) else ()


def _alone(case: Case) -> Collection[int]:
    """Return the rank that waits alone while at least two others wait in one collective that it does not enter."""
    incident = case.incident
    for lonely_in, together in (incident.waits, tuple(reversed(incident.waits))):
        lonely = [r for r in lonely_in.ranks if r in incident.members]
        if together.p2p or len(lonely) != 1 or together.missing != {lonely[0]} or len(together.ranks) < 2:
            continue
        if lonely_in.p2p or lonely_in.missing <= set(together.ranks):
            return lonely
    return ()


# -- the order -------------------------------------------------------------------------------------------------------

ORDER: dict[Root, tuple[Witness, ...]] = {
    Root.CONFLICT: (
        Witness(Reason.EXHAUSTED, _always, _exhausted),
        Witness(Reason.MAJORITY, _always, _minority),
        Witness(Reason.EXCEPTION, _tie, lambda case: pending_exception.side_with_exception(case.states, case.sides)),
        Witness(Reason.ARGUMENT, _tie, lambda case: arguments.side_that_changed(case.states, case.wait)),
        Witness(Reason.EXTRA, _tie, _extra),
        Witness(Reason.SKIPPED, _tie, _skipped),
        Witness(Reason.SITE, _tie, _one_side(call_site.odd_by_site)),
        Witness(Reason.HISTORY, _tie, _one_side(call_site.odd_by_history)),
        Witness(Reason.GROUP_SITE, _tie, _first_in_group),
        Witness(Reason.RHYTHM, _tie, _rhythm),
        Witness(Reason.CONDITION, _tie, _condition),
        Witness(Reason.PATTERN, _tie, lambda case: call_order.left_by(case.states, case.wait)),
    ),
    Root.GONE: (
        Witness(Reason.EXHAUSTED, _always, _exhausted),
        Witness(Reason.HISTORY, _ended_normally, _historic_waiter),
    ),
    Root.CYCLE: (
        Witness(Reason.EXHAUSTED, _always, _exhausted),
        Witness(Reason.EXCEPTION, _always, _with_exception),
        Witness(Reason.MESSAGES, _always, lambda case: message_counts.fewer_messages(case.snapshot, case.incident)),
        Witness(Reason.ARGUMENT, _always, lambda case: arguments.new_peer(case.states, case.calls)),
        Witness(Reason.PATTERN, _always, _departed),
        Witness(Reason.SITE, _always, _new_site_in_cycle),
        Witness(
            Reason.COUNT, _always, lambda case: message_counts.visits_differ(case.snapshot, case.incident, case.here)
        ),
        Witness(Reason.ALONE, lambda case: len(case.incident.waits) == 2, _alone),
        Witness(Reason.DUE, _collectives_only, _not_in_due_call),
    ),
}


def decide(case: Case, without: Collection[str] = ()) -> tuple[tuple[int, ...], Reason]:
    """Return (culprits, the witness that named them); no ranks and NONE if no witness does.

    Args:
        without: Names of witnesses that are not asked, to measure what each is worth.
    """
    for name, ranks in answers(case, without):
        if ranks:
            return ranks, name
    return (), Reason.NONE


def answers(case: Case, without: Collection[str] = ()) -> Iterator[tuple[Reason, tuple[int, ...]]]:
    """Yield the ranks that each applicable witness names, in the declared order."""
    for witness in ORDER[case.incident.root]:
        if witness.name not in without and witness.applies(case):
            yield witness.name, tuple(sorted(witness.testify(case)))


def condition_of(snapshot: Snapshot, wait: Wait, source: Source | None) -> tuple[tuple[int, ...], Condition] | None:
    """Return (ranks that a condition on the rank names, condition) if exactly one of two sides is under one."""
    if source is None or len(wait.sides) != 2:
        return None
    stacks = [_stack(snapshot.ranks[r], wait.calls.get(r), source) for r in map(min, wait.sides)]
    found = [parting.rank_condition(stacks[i], stacks[1 - i], source) for i in (0, 1)]
    for i, side in enumerate(wait.sides):
        mine, theirs = found[i], found[1 - i]
        if mine is not None and theirs is None:
            return tuple(sorted(wait.sides[1 - i] if mine.names_leaver else side)), mine
    return None


def parting_of(snapshot: Snapshot, wait: Wait, culprits: Collection[int], source: Source | None) -> list[Condition]:
    """Return the conditions that can have led the culprits of a conflict to another call."""
    mine, others = sorted(set(wait.calls) & set(culprits)), sorted(set(wait.calls) - set(culprits))
    if source is None or not mine or not others:
        return []
    stacks = [_stack(snapshot.ranks[r], wait.calls.get(r), source) for r in (mine[0], others[0])]
    return parting.parting(stacks[0], stacks[1], source)


def _stack(state: RankState, call: Call | None, source: Source) -> tuple[Site, ...]:
    site = call.site if call is not None else None
    if site is None or state.user_stack[:1] == (site,):
        return callers.call_stack(state.user_stack, state.host_stack, source)
    return callers.with_callers((site, *state.user_stack[1:]), source)
