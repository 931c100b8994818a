"""deadlock: ranks wait for something that can no longer happen, whatever the living ranks do. Proved, not timed out.

A cycle of waits, a wait for a rank that ended or is stopped, calls from different sites in one collective, a file lock held
across a collective, or a rank that finished while the others continued.

Faulty jobs: unet_cells, tensor_rows, mesh_factors, heat_halo, pipe_chunks, ring_attention, polite_night, contrastive_nb,
fsdp_notes, spawn_early, health_check, plateau_break, shard_votes, gpipe_padding, cache_flock, quiet_except,
memory_skip, peer_swap, rescue_save.
Healthy look-alikes: memory_crop, rescue_agreed, main_eval, groups_apart, pipe_three, exit_zero, rebuild_pg, staged_team, split_dev.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import paths
from distdiag.diagnosis.endings import End
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.locks import LockCycle
from distdiag.diagnosis.model.findings import Abstained, Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.incident_finding import incident_findings
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at, op_text, reference, where
from distdiag.diagnosis.waits.wait import last_wait

kind = kinds.DEADLOCK


@dataclass(frozen=True)
class Limits:
    """None: a proof must hold at two polls between which no rank made progress; see `history`."""


limits = Limits()


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the deadlocks."""
    if facts.cascade.end is End.FINISHED:
        yield _finished(facts)
    yield from (f for f in facts.repeated if f.kind == kind.name)
    yield from (lock_finding(facts.snapshot, lock) for lock in facts.locks)
    yield from incident_findings(facts, kind)
    if facts.graph.stuck and not facts.waits_settled:
        yield Abstained("ranks are stuck, but one made progress since the last poll")


# -- wording: deadlocks that are not read from the wait-for graph ----------------------------------------------------


def lock_finding(s: Snapshot, lock: LockCycle) -> Finding:
    """Return the finding of a file lock whose holders wait for the rank that wants it."""
    r, holders = s.ranks[lock.rank], lock.holders
    call = s.ranks[holders[0]].blocked
    assert call is not None
    return Finding(
        kind=kind.name,
        cause="file_lock",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=holders,
        victims=tuple(q for q in lock.members if q not in holders),
        collective=reference(call),
        where=(*(where(s.ranks[h], "waiting") for h in holders), where(r, "lock")),
        waiting=tuple(where(s.ranks[v]) for v in lock.members if v != r.rank and v not in holders),
        step=r.step,
        message=f"rank {r.rank} waits{at(r.current_site)} for a file lock that {rank_list(holders)} {verb(holders, 'holds', 'hold')}, "
        f"and {rank_list(holders)} {verb(holders, 'waits', 'wait')} for rank {r.rank} in "
        f"{op_text(call)}{at(s.ranks[holders[0]].current_site)}",
        cost=NO_PROGRESS,
        advice="release the lock before the collective: hold no lock across one",
    )


def _finished(facts: Facts) -> Finding:
    s, culprits, victims = facts.snapshot, facts.cascade.ranks, facts.cascade.others
    finished = [s.ranks[q] for q in culprits]
    call = last_wait(s.ranks[victims[0]])
    first_echo_s = min((s.ranks[q].ended_s or s.t_s for q in facts.ends), default=s.t_s)
    return Finding(
        kind=kind.name,
        cause="rank_finished",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=victims,
        collective=reference(call) if call else None,
        where=tuple(where(r, "finished") for r in finished),
        waiting=tuple(where(s.ranks[q]) for q in victims),
        step=finished[0].step,
        first_seen_s=min((r.ended_s for r in finished if r.ended_s is not None), default=first_echo_s),
        message=f"{rank_list(culprits)} finished after step {finished[0].step} while {rank_list(victims)} continued"
        + (f" and waited in {op_text(call)}" if call and call.op else "")
        + paths.parting_text(paths.leaving(finished[0].current_site, s.ranks[victims[0]].user_stack, facts.source)),
        cost="the others wait for a rank that has ended, and fail",
        advice="give every rank the same number of steps, or leave the loop on all ranks together (or use Join); check for an "
        "exit (sys.exit, os._exit in a thread) on some ranks only",
    )
