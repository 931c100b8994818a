"""What evidence is: a case goes in, a testimony comes out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from distdiag.diagnosis.culprit.paths import Condition
from distdiag.diagnosis.model.snapshot import Call, RankState, Snapshot
from distdiag.diagnosis.model.syntax import Source, no_source
from distdiag.diagnosis.waits import messages
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.incidents import Incident, Root
from distdiag.diagnosis.waits.wait import Wait, call_at


class Reason(StrEnum):
    """Name of a kind of evidence; NONE is a true tie."""

    EXHAUSTED = "exhausted"  # it ran out of batches
    JOIN = "join"  # its own call met one of a rank that only shadows those of Join's objects
    HANDLER = "handler"  # it makes its call in a handler of a signal
    MAJORITY = "majority"  # fewer ranks than on the other side
    CAUGHT = "caught"  # it has caught an error just before its call, which the others have not
    EXCEPTION = "exception"  # it is handling an exception that the others do not have
    SWALLOWED = "swallowed"  # a collective raised on some ranks, which went on
    LOOP = "loop"  # it is in a loop that the others have left, or the reverse
    ARGUMENT = "argument"  # its dtype, size, root or peer is new at its site
    EXTRA = "extra"  # it made more backward passes than steps
    SKIPPED = "skipped"  # it ran a forward without its backward
    UNUSED = "unused"  # it left a backward in which DDP averages gradients on the others: parameters had none
    DIVERGENCE = "divergence"  # where histories part, its call was not the one that was due
    SITE = "site"  # it is at a site that the others never used
    HISTORY = "history"  # it has used a site that the others never used
    RHYTHM = "rhythm"  # it arrived earlier than ever, or is missing at a site (see `rhythm`)
    CONDITION = "condition"  # only its call is under a condition on the rank
    PATTERN = "pattern"  # it left the order that its calls had kept
    OUTSIDER = "outsider"  # it called a collective of a group that it is not a member of
    MESSAGES = "messages"  # it has sent fewer messages than its peers, or left one receiver out, or one message
    ALONE = "alone"  # it waits alone, the others together
    ORDER = "order"  # all have made these calls before: only their order differs
    AHEAD = "ahead"  # by sites alone, it has gone past the call in which the others are
    PARTING = "parting"  # conditions on data through which the ranks can have parted
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Testimony:
    """One piece of evidence: the ranks that it names, and its wording.

    Attributes:
        text: The end of a sentence, with its separator: `; rank 1 caught OSError`.
        head: What the ranks did, to begin the message: `rank 1 ran out of batches`. Default: from `conditions`.
        advice: What to do about it; empty if only the kind of the incident decides.
        conditions: Those in the source at which the ranks diverged: they are shown apart from `text`.
        name: Set by `witnesses.decide`.
    """

    ranks: tuple[int, ...] = ()
    text: str = ""
    head: str = ""
    advice: str = ""
    conditions: tuple[Condition, ...] = ()
    name: Reason = Reason.NONE


@dataclass(frozen=True)
class Case:
    """One incident, as input of the evidence."""

    snapshot: Snapshot
    graph: WaitGraph
    incident: Incident
    exhausted: Collection[int] = ()  # ranks that ran out of batches while others have some left
    source: Source = no_source

    @property
    def states(self) -> dict[int, RankState]:
        return self.snapshot.ranks

    @property
    def wait(self) -> Wait:
        return self.incident.waits[0]

    def main(self, culprits: Collection[int]) -> Wait:
        """Return the wait that the finding is about: in a cycle the largest one that only waits for culprits."""
        if self.incident.root is Root.GONE:
            return next((wait for wait in self.incident.waits if not wait.p2p), self.wait)
        awaited = [wait for wait in self.incident.waits if not wait.missing.isdisjoint(culprits)]
        waits = awaited if awaited and self.incident.root is Root.CYCLE else self.incident.waits
        waits = sorted(waits, key=lambda wait: (-len(wait.ranks), wait.p2p, min(wait.ranks, default=0)))
        return next((wait for wait in waits if not set(culprits) & set(wait.ranks)), waits[0])

    def at_call(self, group: str, seq: int, apart: Callable[[int, Call], bool], cause: str | None = None) -> Case:
        """Return the case of the same ranks at an earlier collective, where `apart` tells the two sides from each other.

        Args:
            cause: Why its calls are not compatible. Default: as at the later one.
        """
        calls = {q: call for q in self.states if (call := call_at(self.states[q], group, seq)) is not None}
        sides = tuple(frozenset(q for q, call in calls.items() if apart(q, call) is side) for side in (False, True))
        old, members = self.wait, frozenset(calls)
        wait = Wait((group, seq), conflict=cause or old.conflict, sides=sides, calls=calls, died=old.died)
        return replace(self, incident=Incident(self.incident.root, members, (wait,), members | self.incident.victims))

    def call_before(self, wait: Wait, rank: int) -> Call | None:
        """Return a rank's call before the collective of a wait in its group; None if it is not known, or for a message."""
        known = not wait.p2p and wait.seq is not None
        return call_at(self.states.get(rank), wait.group, wait.seq - 1) if known else None

    def own_call(self, rank: int, wait: Wait) -> Call | None:
        """Return the call by which a rank takes part in the collective that others wait in, where each role calls it in its own line.

        That is its newest call of the same op and group. The rank has been at that line as often as one of the others has
        completed its own call, at least once. None if there is no such call.
        """
        state = self.states.get(rank)
        call, q = next(((call, q) for q in wait.ranks if (call := wait.calls.get(q)) is not None), (None, rank))
        if state is None or call is None or call.p2p or call.site is None or call.site.key in state.sites:
            return None
        times = self.states[q].sites.get(call.site.key, 0) - 1 if q in self.states else 0
        same = (c for c in reversed(state.calls) if (c.op, c.group) == (call.op, call.group) and c.site is not None)
        return next((c for c in same if c.site is not None and 0 < times == state.sites.get(c.site.key)), None)

    def in_a_new_round(self, rank: int) -> bool:
        """True if a rank waits for a message that its peer sends only in its next step: it has left none out before."""
        call = self.calls.get(rank)
        if call is None or not call.p2p or call.peer is None:
            return False
        return messages.none_left_out(self.states.get(call.peer), rank, call)

    @cached_property
    def sides(self) -> list[list[int]]:
        """Return the sides: in a conflict the ranks with equal calls, largest first; in a cycle each member."""
        if self.incident.root in (Root.CONFLICT, Root.ABORT):
            return [sorted(side) for side in self.wait.sides]
        return [[rank] for rank in sorted(self.incident.members)]

    @cached_property
    def compared(self) -> list[int]:
        """Return the ranks that the evidence compares: those of all sides."""
        return sorted(rank for side in self.sides for rank in side)

    @cached_property
    def calls(self) -> dict[int, Call | None]:
        waits = self.incident.waits
        return {r: wait.calls.get(r) for wait in waits for r in (wait.calls if wait.conflict else wait.ranks)}

    @cached_property
    def here(self) -> dict[int, str | None]:
        """Return the site of each compared rank's call, as `file:line`."""
        return {r: site_of(self.states.get(r), self.calls.get(r)) for r in self.compared}

    @property
    def one_call(self) -> bool:
        """True for an abort in a call that all made together, with sizes that may differ by rank (all_to_all)."""
        return self.incident.root is Root.ABORT and len(set(self.here.values())) == 1

    @property
    def tie(self) -> bool:
        """True for two sides if the history of every rank is known. Sides of unequal size were decided before."""
        return len(self.sides) == 2 and all(r in self.states for r in self.compared) and not self.one_call

    @cached_property
    def waiting(self) -> list[int]:
        """Return the stuck ranks that wait in a collective of this incident."""
        return sorted({r for wait in self.incident.waits if not wait.p2p for r in wait.ranks} & self.incident.victims)


def site_of(state: RankState | None, call: Call | None) -> str | None:
    """Return the site of a rank's call; the main thread's site if the call has none and the rank waits in it."""
    site = call.site if call is not None else None
    if site is None and state is not None and state.blocked is call:
        site = state.current_site
    return site.key if site is not None else None
