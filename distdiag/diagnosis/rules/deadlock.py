"""deadlock: ranks wait for something that can no longer happen, whatever the living ranks do. Proved, not timed out.

A cycle of waits, a wait for a rank that ended or is stopped, calls from different sites in one collective, a file lock held
across a collective, or a rank that finished while the others continued.
"""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import paths
from distdiag.diagnosis.endings import End
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.text.conditions import diverge_text
from distdiag.diagnosis.text.incident_finding import incident_findings
from distdiag.diagnosis.text.phrases import NO_PROGRESS, op_text, where, wheres
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.waits.incidents import LockCycle
from distdiag.diagnosis.waits.wait import last_wait

kind = kinds.DEADLOCK
limits = None  # a proof must hold at two polls between which no rank made progress; see `history`
FILE_LOCK = Template(kind, "file_lock",
    "rank {rank} waits{at_lock} for a file lock that {culprits} {culprits:holds|hold}, and {culprits} "
    "{culprits:waits|wait} for rank {rank} in {collective}{site}", NO_PROGRESS,
    "release the lock before the collective: hold no lock across one", proved=True)  # fmt: skip
FINISHED = Template(kind, "rank_finished",
    "{culprits} finished after step {step} while {victims} continued{waited}{diverge}",
    "the others wait for a rank that has ended, and fail",
    "give every rank the same number of steps, or leave the loop on all ranks together (or use Join); check for "
    "an exit (sys.exit, os._exit in a thread) on some ranks only", proved=True)  # fmt: skip


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    if facts.cascade.end is End.FINISHED:
        yield _finished(facts)
    yield from (lock_finding(facts.snapshot, lock) for lock in facts.locks)
    yield from incident_findings(facts, kind)
    if facts.graph.stuck and not facts.waits_settled:
        yield Abstained("ranks are stuck, but one made progress since the last poll")


def lock_finding(s: Snapshot, lock: LockCycle) -> Finding:
    """Return the finding of a file lock whose holders wait for the rank that wants it."""
    wanting, holder = s.ranks[lock.rank], s.ranks[lock.holders[0]]
    call = holder.blocked
    assert call is not None
    victims = [q for q in lock.members if q not in lock.holders]
    return FILE_LOCK(
        culprits=lock.holders, victims=victims, collective=call,
        where=(*wheres(s, lock.holders, "waiting"), where(wanting, "lock")),
        waiting=wheres(s, (q for q in victims if q != lock.rank)), step=wanting.step, rank=lock.rank,
        at_lock=wanting.current_site,
    )  # fmt: skip


def _finished(facts: Facts) -> Finding:
    s, culprits, victims = facts.snapshot, facts.cascade.ranks, facts.cascade.others
    first, waiting = s.ranks[culprits[0]], s.ranks[victims[0]]
    call = last_wait(waiting)
    times = [t for q in culprits if (t := s.ranks[q].ended_s) is not None]
    return FINISHED(
        culprits=culprits, victims=victims, collective=call, where=wheres(s, culprits, "finished"),
        waiting=wheres(s, victims), step=first.step,
        first_seen_s=min(times or [s.t_s, *(s.ranks[q].ended_s or s.t_s for q in facts.ends)]),
        waited=f" and waited in {op_text(call)}" if call and call.op else "",
        diverge=diverge_text(paths.leaving(first.current_site, waiting.user_stack, facts.source)),
    )  # fmt: skip
