"""Witnesses: the declared order in which evidence decides who is the culprit of an incident, and explains it.

A witness is one kind of evidence. `names` returns the ranks that it accuses; the first witness that names a rank decides. `explain` is
its wording, made from the same facts; it is also asked about ranks that another witness named, and then explains them. A witness
without `names` only explains. If no witness names a rank, it is a true tie: no rank is blamed, and all members are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from distdiag.diagnosis.culprit import (
    arguments,
    call_order,
    call_site,
    conditions,
    divergence,
    extra_backward,
    message_counts,
    pending_exception,
    rhythm,
    skipped,
    uneven_loop,
)
from distdiag.diagnosis.culprit.case import Case, Reason, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Life
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.waits.incidents import Root

EXHAUSTED_ADVICE = "give every rank the same number of batches (drop_last, DistributedSampler), or use Join"

Names = Callable[[Case], Collection[int]]
Explain = Callable[[Case, Sequence[int]], Testimony | None]


def _always(_: Case) -> bool:
    return True


class Witness(NamedTuple):
    """One kind of evidence.

    Attributes:
        names: Return the ranks that it accuses; None: it only explains ranks that others accuse.
        applies: True if it may accuse ranks in this case.
        explain: Return its wording for the ranks given, None if it does not hold for them.
        claim: Its wording, if that needs no facts: only about ranks that it accused. `{ranks}`, `{has}`, `{is}` are filled in.
    """

    name: Reason
    names: Names | None
    applies: Callable[[Case], bool] = _always
    explain: Explain | None = None
    claim: str = ""

    def testify(self, case: Case, ranks: Sequence[int]) -> Testimony:
        """Return the evidence against the ranks that it accuses."""
        words = {"ranks": rank_list(ranks), "has": verb(ranks, "has", "have"), "is": verb(ranks, "is", "are")}
        worded = self.explain(case, ranks) if self.explain is not None else None
        return worded or Testimony(name=self.name, ranks=tuple(ranks), text=self.claim.format(**words))


# -- when a witness applies ------------------------------------------------------------------------------------------


def _tie(case: Case) -> bool:
    """True for two sides if the history of every rank is known. `_minority` comes before: they have equal size."""
    return len(case.sides) == 2 and all(r in case.states for r in case.compared) and not _one_call(case)


def _one_call(case: Case) -> bool:
    """True for an abort in a call that all made together, with sizes that may differ by rank (all_to_all)."""
    return case.incident.root is Root.ABORT and len(set(case.here.values())) == 1


def _argument_applies(case: Case) -> bool:
    return _tie(case) or _one_call(case)


def _different_calls(case: Case) -> bool:
    """True for a tie between calls that differ in more than their arguments."""
    return _tie(case) and case.wait.conflict in ("op", "shape")


def _ended_normally(case: Case) -> bool:
    """True if one rank waits for ranks that all ended normally, and all other stuck ranks wait for that one."""
    waiting = _waiting_for_ended(case)
    normally = all(case.states[q].life == Life.FINISHED and not case.states[q].exit_code for q in case.ended)
    return len(waiting) == 1 and normally and set(case.stuck) <= case.graph.victims_of(waiting) | set(waiting)


def _two_waits(case: Case) -> bool:
    return len(case.incident.waits) == 2


# -- whom a witness names --------------------------------------------------------------------------------------------


def _out_of(ranks: Collection[int], exhausted: Collection[int]) -> tuple[int, ...]:
    """Return those of `ranks` that ran out of batches, if not all did."""
    out = tuple(sorted(set(ranks) & set(exhausted)))
    return out if len(out) < len(ranks) else ()


def _exhausted(case: Case) -> Collection[int]:
    match case.incident.root:
        case Root.CONFLICT | Root.ABORT:
            return _out_of(case.compared, case.exhausted)
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
    found = skipped.skipped(case.snapshot, case.compared)
    return () if found is None else next((s for s in case.sides if s == [found.rank]), ())


def _extra(case: Case) -> Collection[int]:
    found = extra_backward.extra_backward(case.snapshot, case.compared)
    return () if found is None else next((s for s in case.sides if s == [found.rank]), ())


def _rhythm(case: Case) -> Collection[int]:
    odd = rhythm.rhythm_of(case.snapshot, case.wait)
    return () if odd is None else odd.ranks


def _condition(case: Case) -> Collection[int]:
    behind = conditions.on_rank(case)
    return () if behind is None else behind[0]


def _historic_waiter(case: Case) -> Collection[int]:
    """Return the only rank that waits for ended ranks, if it has made calls that those never made."""
    waiting = _waiting_for_ended(case)
    here = {r: call_site.site_of(case.states[r], case.states[r].blocked) for r in waiting}
    return waiting if call_site.odd_by_history(case.states, here, waiting, case.ended) else ()


def _raising_side(case: Case) -> Collection[int]:
    return pending_exception.side_with_exception(case.states, case.sides)


def _diverged(case: Case) -> Collection[int]:
    found = divergence.of_sides(case)
    return () if found is None else found[0]


def _changed_argument(case: Case) -> Collection[int]:
    if _one_call(case):
        return arguments.ranks_with_new_size(case.states, case.wait)
    return arguments.side_that_changed(case.states, case.wait)


def _fewer_messages(case: Case) -> Collection[int]:
    return message_counts.fewer_messages(case.snapshot, case.incident)


def _new_peer(case: Case) -> Collection[int]:
    return arguments.new_peer(case.states, case.calls)


def _visits_differ(case: Case) -> Collection[int]:
    return message_counts.visits_differ(case.snapshot, case.incident, case.here)


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


def _explain_exhausted(case: Case, ranks: Sequence[int]) -> Testimony | None:
    if not ranks or tuple(sorted(_exhausted(case))) != tuple(ranks):
        return None
    text = f"; {rank_list(ranks)} ran out of batches"
    return Testimony(name=Reason.EXHAUSTED, ranks=tuple(ranks), text=text, advice=EXHAUSTED_ADVICE)


# -- the order -------------------------------------------------------------------------------------------------------

_CONFLICT = (
    Witness(Reason.EXHAUSTED, _exhausted, explain=_explain_exhausted),
    Witness(Reason.MAJORITY, _minority),  # the sides are in every message
    Witness(Reason.EXCEPTION, _raising_side, _tie, pending_exception.explain),
    Witness(Reason.LOOP, None, explain=uneven_loop.explain),
    Witness(Reason.ARGUMENT, _changed_argument, _argument_applies, arguments.explain),
    Witness(Reason.EXTRA, _extra, _different_calls, extra_backward.explain),
    Witness(Reason.SKIPPED, _skipped, _different_calls, skipped.explain),
    Witness(Reason.DIVERGENCE, _diverged, _tie, divergence.explain),
    Witness(Reason.SITE, _one_side(call_site.odd_by_site), _tie, claim="; only {ranks} {has} ever been at that line"),
    Witness(
        Reason.HISTORY, _one_side(call_site.odd_by_history), _tie,
        claim="; {ranks} {has} made collective calls at a line where the others have never been",
    ),
    Witness(Reason.RHYTHM, _rhythm, _tie, rhythm.explain),
    Witness(Reason.CONDITION, _condition, _tie, conditions.explain_rank),
    Witness(Reason.ORDER, None, explain=arguments.explain_order),
    Witness(Reason.PARTING, None, explain=conditions.explain_parting),
    Witness(Reason.COUNT, None, explain=message_counts.explain_more),
)  # fmt: skip
ORDER: dict[Root, tuple[Witness, ...]] = {
    Root.CONFLICT: _CONFLICT,
    Root.ABORT: _CONFLICT,
    Root.GONE: (
        Witness(Reason.EXHAUSTED, _exhausted, explain=_explain_exhausted),
        Witness(Reason.HISTORY, _historic_waiter, _ended_normally),
        Witness(Reason.PARTING, None, explain=conditions.explain_leaving),
    ),
    Root.CYCLE: (
        Witness(Reason.EXHAUSTED, _exhausted, explain=_explain_exhausted),
        Witness(Reason.EXCEPTION, _with_exception, explain=pending_exception.explain),
        Witness(Reason.MESSAGES, _fewer_messages, claim="; {ranks} {has} sent fewer messages than the others"),
        Witness(Reason.ARGUMENT, _new_peer, explain=arguments.explain_peer),
        Witness(Reason.PATTERN, _departed, claim="; {ranks} {has} left the order of its earlier calls, the others kept theirs"),
        Witness(Reason.SITE, _new_site_in_cycle, claim="; only {ranks} {has} ever been at that line"),
        Witness(Reason.COUNT, _visits_differ, claim="; {ranks} {has} been there more or less often than all other ranks"),
        Witness(Reason.ALONE, _alone, _two_waits, claim="; {ranks} {is} alone, the others wait together"),
        Witness(
            Reason.DUE, _not_in_due_call, _collectives_only,
            claim="; {ranks} {is} not in the call that always followed its calls before",
        ),
        Witness(Reason.PARTING, None, explain=conditions.explain_cycle),
    ),
}  # fmt: skip
WEAK = (Reason.NONE, Reason.ALONE, Reason.DUE)  # a call with the wrong group is also made alone, and not due
# The culprits are at another point of the program, not in the same call with another operation.
OTHER_PLACE = (
    Reason.EXHAUSTED, Reason.EXCEPTION, Reason.EXTRA, Reason.SKIPPED, Reason.DIVERGENCE, Reason.SITE, Reason.HISTORY,
    Reason.RHYTHM, Reason.CONDITION,
)  # fmt: skip


def decide(case: Case, without: Collection[str] = ()) -> tuple[Testimony, tuple[Testimony, ...]]:
    """Return (the testimony that names the culprits, what other evidence explains about the same ranks, in order).

    The testimony has no ranks and is named NONE if no witness names any.

    Args:
        without: Names of witnesses that are not asked, to measure what each is worth.
    """
    asked = [witness for witness in ORDER[case.incident.root] if witness.name not in without]
    decided = Testimony(name=Reason.NONE)
    for witness in asked:
        if witness.names is not None and witness.applies(case) and (ranks := tuple(sorted(witness.names(case)))):
            decided = witness.testify(case, ranks)
            break
    also = (w.explain(case, decided.ranks) for w in asked if w.explain is not None and w.name != decided.name)
    return decided, tuple(testimony for testimony in also if testimony is not None)
