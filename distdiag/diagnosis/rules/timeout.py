"""timeout: a collective ran into its group's timeout although the late rank was alive.

Faulty jobs: tight_timeout, feature_sync. Healthy look-alikes: long_validation, slow_archive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.endings import End, timed_out
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.text.phrases import at, op_text, reference, where, where_stack
from distdiag.diagnosis.waits.wait import last_wait
from distdiag.terms.units import rough_duration

kind = kinds.TIMEOUT


@dataclass(frozen=True)
class Limits:
    """None: the backend's own timeout is the limit."""


limits = Limits()


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the timeout that ended the job."""
    if facts.cascade.end is End.TIMEOUT:
        yield _finding(facts)


def _finding(facts: Facts) -> Finding:
    s, late = facts.snapshot, facts.cascade.ranks
    victims = timed_out(s, facts.ends)
    first = victims[0]
    call = last_wait(first)
    waited_s = (first.ended_s or s.t_s) - call.entered_s if call is not None and call.entered_s is not None else None
    ranks = [s.ranks[q] for q in late]
    stack = ranks[0].user_stack
    return Finding(
        kind=kind.name,
        cause="late_rank",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=late,
        victims=tuple(r.rank for r in victims),
        collective=reference(call) if call else None,
        where=tuple(w for r in ranks for w in where_stack(r, r.user_stack, None, 3)),
        waiting=tuple(where(r) for r in victims),
        step=first.step,
        first_seen_s=call.entered_s if call else None,
        message=f"{op_text(call) if call else 'a collective'} ran into its timeout on "
        f"{rank_list([r.rank for r in victims])}: {rank_list(late)} {'was' if len(late) == 1 else 'were'} alive and late"
        + (f" by more than {rough_duration(waited_s)}" if waited_s else "")
        + at(stack[0] if stack else None),
        cost="the job ended",
        advice="do that work on all ranks, or outside the step, or raise the group's timeout to cover it",
    )
