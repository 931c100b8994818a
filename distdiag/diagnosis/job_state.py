"""The state of the whole job, in one word and one line."""

from __future__ import annotations

import signal as signals

from distdiag.diagnosis import kinds
from distdiag.diagnosis.endings import ECHOES, ending_kind, ends, escalated, follows_stop, killed_together
from distdiag.diagnosis.history import all_ended
from distdiag.diagnosis.model.findings import ATTEMPT, STOPPED_BY, Finding, Severity, State, at_least, rank_list
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.rules.stall import unseen_text, unseen_wait, waited_for, waits_for
from distdiag.diagnosis.text.phrases import op_text, shortened
from distdiag.diagnosis.waits.delays import kept_waiting
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.terms.signals import signal_name
from distdiag.terms.units import counted, rough_duration

IN_CALL_S = 5.0  # in which a call with a killed rank fails, and a SIGINT that has come before ends its rank
LONG_WAIT_S = 2.0  # of some ranks in a collective, before the state mentions it
_WORST_FIRST = (State.DEADLOCKED, State.STALLED, State.DEGRADED)


def job_state(
    s: Snapshot, graph: WaitGraph, findings: list[Finding], final: bool, lived: tuple[Snapshot, WaitGraph] | None = None
) -> tuple[State, str]:
    """Return the state, and what to show with it.

    Args:
        findings: Reported and open.
        lived: The last poll in which all ranks lived.
    """
    worst = [f for f in findings if at_least(f.severity, Severity.ERROR)]
    expected = s.expected or s.world_size
    if s.ranks and all_ended(s) and (final or len(s.ranks) >= expected):
        left = next((f for f in findings if (f.kind, f.severity) == (kinds.RANK_LOST.name, Severity.INFO)), None)
        if left is not None and not worst:
            return (
                State.ENDED,
                f"{ATTEMPT}{s.attempt} ended: {rank_list(left.culprits)} left, and the launcher starts all ranks again",
            )
        return _ended(s, worst, lived)
    for state in _WORST_FIRST:
        for f in findings:
            if kinds.of(f).state is state and _decides(f):
                return state, f.message
    lives = [r.life for r in s.ranks.values()]
    starting = all(x == Life.STARTING for x in lives) and not any(r.step for r in s.ranks.values())
    if len(lives) < expected or starting:
        missing = sorted(set(range(s.world_size)) - set(s.ranks)) if expected == s.world_size else []
        listed = f"; missing {', '.join(map(str, missing[:8]))}" if missing else ""
        return State.WAITING, f"{len(s.ranks)} of {expected} ranks have reported{listed}"
    if worst:
        return State.DEGRADED, worst[0].message
    return State.RUNNING, _not_heard(s) or _waits(s, graph)


def _decides(f: Finding) -> bool:
    kind = kinds.of(f)
    return kinds.blocks(f) if kind.blocks else not kind.fatal or at_least(f.severity, Severity.ERROR)


def _ended(s: Snapshot, worst: list[Finding], lived: tuple[Snapshot, WaitGraph] | None) -> tuple[State, str]:
    bad = [r for r in s.ranks.values() if r.life != Life.FINISHED and not r.ended_at_rest]
    if bad:
        if (stopped := _stopped_by(s, bad)) is not None:
            waited = _waited(*lived) if lived is not None and not worst else ""
            until = f", while {waited}" if waited else ""
            who = "distdiag, as DISTDIAG_END_HANGS_S asks" if s.hang_ended else "the launcher or a person"
            return State.FAILED, f"{STOPPED_BY} {stopped} (from {who}){until}"
        again = f"{ATTEMPT}{s.attempt} failed, and the launcher starts all ranks again: " if s.restarts_left > 0 else ""
        return State.FAILED, again + _failure(s, bad, worst)
    if any(kinds.of(f).fatal for f in worst):
        return State.FAILED, worst[0].message
    steps = max((r.step for r in s.ranks.values()), default=0)
    how = "ended normally" if all(r.signal is None for r in s.ranks.values()) else "finished their scripts"
    how = how if all(r.life == Life.FINISHED for r in s.ranks.values()) else "were idle when they were ended"
    return State.ENDED, f"all ranks {how}" + (f" after {counted(steps, 'step')}" if steps else "")


def _failure(s: Snapshot, bad: list[RankState], worst: list[Finding]) -> str:
    """Return how a culprit failed, else the first rank; of ranks that only lost a connection, what the culprit did."""
    # a victim may end before the rank that failed, but what the launcher ended tells nothing
    culprits = {q for f in worst[:1] for q in f.culprits if q in s.ranks}
    blamed = {q for q in culprits if s.ranks[q].signal != signals.SIGTERM}

    def order(r: RankState) -> tuple[bool, bool, float]:
        return r.rank not in blamed, ending_kind(r) in ECHOES, r.ended_s if r.ended_s is not None else s.t_s

    first = min(bad, key=order)
    code = f"exit code {first.exit_code}" if first.exit_code else "an unknown end"
    how = first.exception or (_signal(first) if first.signal else code)
    if ending_kind(first) == "echo" and (messages := [f.message for f in worst if kinds.of(f).fatal and f.culprits]):
        return messages[0]
    causes = ends(s)
    failed = [r for r in bad if r is first or causes.get(r.rank) != "outside"]  # the launcher ended the rest
    return f"rank {first.rank}: {shortened(how, 120)}; {len(failed)} of {len(s.ranks)} failed"


def _stopped_by(s: Snapshot, bad: list[RankState]) -> str | None:
    """Return the signal from outside that ended the job, if no rank failed by itself."""
    outside = [r for r in bad if ending_kind(r) == "outside" or escalated(s, r.rank)]
    if s.stopped_by is not None and all(r in outside or follows_stop(r, outside) for r in bad):
        return signal_name(s.stopped_by)
    first = _stopped_first(bad)
    if first is None and killed_together(s, bad):
        return signal_name(signals.SIGKILL)
    return _signal(first) if first is not None else None


def _stopped_first(bad: list[RankState]) -> RankState | None:
    """Return the first rank that a signal from outside ended, if no rank failed by itself.

    A launcher kills the ranks that do not end soon after its signal. Until then another one may be in a call with them, and SIGINT
    ends it only afterwards; no launcher sends that by itself when a rank was killed.
    """
    outside = [r for r in bad if ending_kind(r) == "outside"]
    first = min(outside, key=lambda r: r.ended_s or 0.0, default=None)
    if first is None:
        return None
    since_s = (first.ended_s or 0.0) - (IN_CALL_S if _signal(first) == "SIGINT" else 0.0)
    rest = (r for r in bad if r not in outside and not follows_stop(r, outside))
    later = all(r.signal == signals.SIGKILL and (r.ended_s is None or r.ended_s >= since_s) for r in rest)
    return first if later else None


def _signal(r: RankState) -> str:
    """Return the name of the signal that ended a rank; a KeyboardInterrupt is Ctrl-C."""
    if r.signal is None:
        return "SIGINT" if (r.exception or "").startswith("KeyboardInterrupt") else "a signal"
    return signal_name(r.signal)


def _not_heard(s: Snapshot) -> str:
    """Return which ranks are on nodes that are not heard of; they may be alive."""
    silent = [r for r in s.ranks.values() if r.life == Life.SILENT and r.heard_at]
    if not silent:
        return ""
    longest = max(silent, key=lambda r: r.heartbeat_age_s or 0.0)
    since = f"{longest.heard_at} ({rough_duration(longest.heartbeat_age_s or 0.0)})"
    return f"{rank_list([r.rank for r in silent])} not heard of since {since}"


def _late(s: Snapshot, graph: WaitGraph) -> list[tuple[list[int], float, RankState]]:
    """Return (ranks that wait, for how long, for whom) of each rank that others have waited for for long, the longest wait first."""
    kept = ((kept_waiting(s, graph, q), s.ranks[q]) for q in graph.sinks if q in s.ranks)
    return sorted(((*found, r) for found, r in kept if found and found[1] > LONG_WAIT_S), key=lambda x: -x[1])


def _waited(s: Snapshot, graph: WaitGraph) -> str:
    """Return who had waited for whom, and where those were."""
    late = _late(s, graph)
    if not late:
        unseen = unseen_wait(s, graph)
        return unseen_text(*unseen) if unseen is not None else ""
    waiting, waited_s, first = late[0]
    there = [r for victims, _, r in late if victims == waiting and r.current_site == first.current_site]
    return waited_for(waiting, there, waited_s)


def _waits(s: Snapshot, graph: WaitGraph) -> str:
    """Return who has waited how long for whom, and from when on that is judged; else in which call some ranks wait."""
    if late := _late(s, graph):
        waiting, waited_s, first = late[0]
        return waits_for(waiting, first, waited_s)
    waiting = [q for q in graph.of_rank if s.ranks[q].blocked is not None]
    call = s.ranks[waiting[0]].blocked if waiting and len(waiting) < len(s.ranks) else None
    if call is None or call.entered_s is None or s.t_s - call.entered_s <= LONG_WAIT_S:
        return ""
    return f"{len(waiting)} of {len(s.ranks)} ranks have waited in {op_text(call)} for {rough_duration(s.t_s - call.entered_s)}"
