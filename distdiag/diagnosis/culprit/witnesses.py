"""Witnesses: the declared order in which evidence decides who is the culprit of an incident, and explains it.

A witness is one kind of evidence. `accuse` returns a testimony, which names ranks and words why; the first witness that accuses anybody
decides. The others explain: their testimony about the same ranks is evidence, too. If no witness names a rank, it is a true tie: no
rank is blamed, and all members are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from distdiag.diagnosis.culprit import (
    arguments,
    call_order,
    conditions,
    divergence,
    handlers,
    joined,
    loops,
    message_counts,
    outsiders,
    passes,
    pending_exception,
    rhythm,
    sites,
    stacks,
)
from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.waits.incidents import Root

Accuse = Callable[[Case], Testimony | None]
Explain = Callable[[Case, Sequence[int]], Testimony | None]


class Witness(NamedTuple):
    """One kind of evidence.

    Attributes:
        accuse: Return whom it accuses, and why; None: it only explains ranks that others accuse.
        explain: Return its testimony about ranks that another witness named, or about nobody; by default its accusation of them.
        applies: True if its accusation may decide this case.
    """

    name: Reason
    accuse: Accuse | None = None
    explain: Explain | None = None
    applies: Callable[[Case], bool] = lambda _: True

    def about(self, case: Case, ranks: Sequence[int]) -> Testimony | None:
        """Return its testimony about these ranks."""
        if self.explain is not None:
            return self.explain(case, ranks)
        found = self.accuse(case) if self.accuse is not None and ranks else None
        return found if found is not None and found.ranks == tuple(ranks) else None


_tie = attrgetter("tie")


def _majority(case: Case) -> bool:
    """True if one side is larger than every other."""
    first, second, *_ = case.sides
    return len(first) > len(second)


def _different_calls(case: Case) -> bool:
    """True for a tie between calls that differ in more than their arguments."""
    return case.tie and case.wait.conflict in ("op", "shape")


def _caught(case: Case) -> Testimony | None:
    """Accuse ranks that went on after an error, although they are the majority: what they do now no other does."""
    return pending_exception.went_on(case) or conditions.by_handler(case)


def _minority(case: Case) -> Testimony | None:
    """Accuse all ranks outside the largest side; the sides are in every message."""
    return Testimony(ranks=tuple(sorted(r for side in case.sides[1:] for r in side)))


def _alone(case: Case) -> Testimony | None:
    """Accuse the rank that waits alone while at least two others wait in one collective that it does not enter.

    Not a rank that waits for a message which its peer may have left out.
    """
    waits = case.incident.waits
    for lonely_in, together in (waits, waits[::-1]) if len(waits) == 2 else ():
        lonely = {r for r in lonely_in.ranks if r in case.incident.members}
        apart = len(lonely) == 1 < len(together.ranks) and together.missing == lonely and not together.p2p
        if not apart or not lonely_in.missing <= set(together.ranks):
            continue
        if not lonely_in.p2p or case.in_a_new_round(min(lonely)):
            text = f"rank {min(lonely):,} is alone, the others wait together"
            if set(lonely_in.ranks) - lonely:  # in no cycle: they have been where the others wait
                text = f"only rank {min(lonely):,} of that group is there"
            return Testimony(ranks=tuple(lonely), text=f"; {text}")
    return None


_CONFLICT = (
    Witness(Reason.JOIN, joined.accuse),
    Witness(Reason.EXHAUSTED, loops.exhausted),
    Witness(Reason.HANDLER, handlers.accuse),
    Witness(Reason.CAUGHT, _caught, applies=_majority),
    Witness(Reason.ORDER, arguments.over_set, applies=lambda case: case.wait.conflict in ("shape", "dtype", "root")),
    Witness(Reason.MAJORITY, _minority, applies=_majority),
    Witness(Reason.EXCEPTION, pending_exception.accuse, pending_exception.explain, _tie),
    Witness(Reason.SWALLOWED, explain=pending_exception.swallowed),
    Witness(Reason.LOOP, explain=loops.uneven),
    Witness(Reason.ARGUMENT, arguments.accuse, arguments.explain),
    Witness(Reason.EXTRA, passes.extra, applies=_different_calls),
    Witness(Reason.SKIPPED, passes.skipped, applies=_different_calls),
    Witness(Reason.UNUSED, passes.unused, applies=_different_calls),
    Witness(Reason.DIVERGENCE, divergence.accuse, applies=_tie),
    Witness(Reason.CONDITION, conditions.on_rank, applies=_tie),
    Witness(Reason.SITE, sites.new),
    Witness(Reason.HISTORY, sites.history),
    Witness(Reason.RHYTHM, rhythm.accuse, applies=_tie),
    Witness(Reason.AHEAD, stacks.ahead),
    Witness(Reason.ORDER, explain=arguments.reordered),
    Witness(Reason.PARTING, explain=conditions.between_sides),
)
ORDER: dict[Root, tuple[Witness, ...]] = {
    Root.CONFLICT: _CONFLICT,
    Root.ABORT: _CONFLICT,
    Root.GONE: (
        Witness(Reason.EXHAUSTED, loops.exhausted),
        Witness(Reason.HISTORY, sites.knows_more_than_ended),
        Witness(Reason.MESSAGES, explain=message_counts.explain),
        Witness(Reason.PARTING, explain=conditions.leaving),
    ),
    Root.CYCLE: (
        Witness(Reason.EXHAUSTED, loops.exhausted),
        Witness(Reason.HANDLER, handlers.accuse),
        Witness(Reason.EXCEPTION, pending_exception.accuse, pending_exception.explain),
        Witness(Reason.SWALLOWED, explain=pending_exception.swallowed),
        Witness(Reason.OUTSIDER, outsiders.accuse),
        Witness(Reason.EXTRA, passes.extra),
        Witness(Reason.SKIPPED, passes.skipped),
        Witness(Reason.MESSAGES, message_counts.accuse, message_counts.explain),
        Witness(Reason.ARGUMENT, arguments.new_peer),
        Witness(Reason.PATTERN, call_order.pattern),
        Witness(Reason.DIVERGENCE, divergence.accuse),
        Witness(Reason.AHEAD, stacks.in_cycle),
        Witness(Reason.ALONE, _alone),
        Witness(Reason.ORDER, explain=call_order.message_later),
        Witness(Reason.PARTING, explain=conditions.past_the_call),
        Witness(Reason.ORDER, explain=call_order.called_before),
    ),
}
# in a cycle: a call with the wrong group is also made alone, and not due
WEAK = (Reason.NONE, Reason.ALONE, Reason.DIVERGENCE)
# The culprits are at another point of the program, not in the same call with another operation.
OTHER_PLACE = (
    Reason.EXHAUSTED, Reason.JOIN, Reason.HANDLER, Reason.CAUGHT, Reason.EXCEPTION, Reason.EXTRA, Reason.SKIPPED, Reason.UNUSED, Reason.DIVERGENCE, Reason.SITE, Reason.HISTORY,
    Reason.RHYTHM, Reason.CONDITION, Reason.AHEAD,
)  # fmt: skip


def leave_out(names: Collection[str]) -> None:
    """Ask these witnesses no more in this process, to measure what each is worth."""
    for root, asked in ORDER.items():
        ORDER[root] = tuple(witness for witness in asked if witness.name not in names)


def decide(case: Case) -> tuple[Testimony, tuple[Testimony, ...]]:
    """Return (the testimony that names the culprits, what other evidence explains about the same ranks, in order).

    The testimony has no ranks and is named NONE if no witness names any.
    """
    asked = ORDER[case.incident.root]
    decided = Testimony()
    for witness in asked:
        found = witness.accuse(case) if witness.accuse is not None and witness.applies(case) else None
        if found is not None:
            decided = replace(found, name=witness.name)
            break
    also = ((w.name, w.about(case, decided.ranks)) for w in asked if w.name != decided.name)
    return decided, tuple(replace(testimony, name=name) for name, testimony in also if testimony is not None)
