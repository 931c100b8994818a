"""Evidence from sites alone, for snapshots without counts: which side is past the call that the other is in.

Only stacks need it: where calls are counted, other witnesses know who made one call less. It can suspect, and
prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distdiag.diagnosis.culprit import paths, rounds
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import RankState
from distdiag.diagnosis.model.syntax import Source
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import at

States = Mapping[int, RankState]


def accuse(case: Case) -> Testimony | None:
    if case.snapshot.source != "stacks" or not case.tie:
        return None
    first, second = case.sides
    return between(case.states, first, second, case.source)


def between(states: States, first: Sequence[int], second: Sequence[int], source: Source) -> Testimony | None:
    """Accuse the one of two sides that is ahead of the other; nobody if both, or neither, can be."""
    sides = (first, second), (second, first)
    for odd, rest in sides:
        mine, theirs = states[odd[0]], states[rest[0]]
        if mine.phase == "forward" and theirs.phase == "backward":  # the forward of that step came before
            is_in = f"{rank_list(odd)} {verb(odd, 'is', 'are')} in the next forward"
            return Testimony(ranks=tuple(odd), text=f"; {is_in}, without the backward{at(theirs.current_site)}")
    found = [(odd, rest) for odd, rest in sides if _has_passed(states[odd[0]], states[rest[0]], source)]
    if len(found) != 1:
        return None
    ((odd, rest),) = found
    passed = f"{verb(odd, 'has', 'have')} passed{at(states[rest[0]].current_site).removeprefix(' at')}"
    text = f"; {rank_list(odd)} {passed}, where {rank_list(rest)} still {verb(rest, 'is', 'are')}"
    return Testimony(ranks=tuple(odd), text=text)


def accuse_in_cycle(case: Case) -> Testimony | None:
    """Accuse the rank from which another waits for a message while it is already in a collective with others; else by `rounds`."""
    waits = case.incident.waits
    if case.snapshot.source != "stacks":
        return None
    return (_without_sending(case) if len(waits) == 2 else None) or rounds.accuse(case)


def _without_sending(case: Case) -> Testimony | None:
    waits = case.incident.waits
    message, collective = sorted(waits, key=lambda wait: not wait.p2p)
    calls = [message.calls[rank] for rank in message.ranks if rank in message.calls]
    if not message.p2p or collective.p2p or not calls or not all(call.op.endswith("recv") for call in calls):
        return None
    awaited = message.missing & set(collective.ranks)
    if len(message.missing) != 1 or not awaited or len(collective.ranks) < 2:
        return None
    (rank,) = awaited
    where = collective.calls.get(rank)
    place = at(where.site) if where is not None else ""
    return Testimony(ranks=(rank,), text=f"; rank {rank} went on to the next collective{place} without sending")


def _has_passed(mine: RankState, theirs: RankState, source: Source) -> bool:
    """True if a rank is at a later line of the innermost function that it shares with another.

    Not if it is under a condition that the other is not under: then the other may have left out this call.
    """
    for a, b in zip(mine.user_stack[::-1], theirs.user_stack[::-1], strict=False):
        if a != b:
            later = (a.file, a.function) == (b.file, b.function) and a.line > b.line
            return later and paths.in_no_branch(mine.user_stack, theirs.user_stack, source)
    return False
