"""rank_lost: a rank was killed, crashed, or went silent while the job continues, and nothing in the job explains it.

If several ranks ended, the first end that no other end explains is the cause; see `endings`.

Faulty jobs: video_oom, oom_rank, fused_norm, parquet_rows, custom_grad, label_guard, resume_opt, quiet_except,
ckpt_parts.
Healthy look-alikes: exit_zero, spawn_fine, no_dist.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import parting
from distdiag.diagnosis.endings import UNUSED, End
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Certainty, Finding, Severity, at_least, rank_list
from distdiag.diagnosis.model.snapshot import Life, RankState, Snapshot
from distdiag.diagnosis.text.phrases import at, shortened, site_text, where, where_stack
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.terms.units import rough_duration

kind = kinds.RANK_LOST
_WORKER = re.compile(r"DataLoader worker \(pid.{0,40}\) (exited|is killed)")


@dataclass(frozen=True)
class Limits:
    silent_s: float = 30.0
    """Seconds without a heartbeat while others wait. A network file system may show files seconds late."""


limits = Limits()


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the ranks that were lost."""
    match facts.cascade.end:
        case End.LOST:
            yield _lost(facts)
        case End.ECHOES if not any(at_least(f.severity, Severity.ERROR) for f in (*facts.reported, *facts.found)):
            yield _echoes(facts.snapshot, facts.cascade.others)
        case End.UNCONNECTED:
            yield _unconnected(facts.snapshot, facts.cascade.others)
    stalled = any(f.kind == kinds.STALL.name for f in facts.reported)
    if facts.stopped or (stalled and facts.ends) or facts.cascade.end in (End.LOST, End.ECHOES, End.UNCONNECTED):
        return
    yield from _silent(facts.snapshot, facts.graph)
    yield from _crashed_at_exit(facts)


def _crashed_at_exit(facts: Facts) -> Iterator[Finding]:
    """Yield ranks whose script ended normally and whose process then crashed natively: a failure for the launcher."""
    crashed = [r for r in facts.snapshot.ranks.values() if r.life == Life.FINISHED and r.signal in _NATIVE_CRASHES]
    if crashed and not any(at_least(f.severity, Severity.ERROR) for f in (*facts.reported, *facts.found)):
        yield _at_exit(crashed)


def _silent(s: Snapshot, graph: WaitGraph) -> Iterator[Finding]:
    """Yield ranks without heartbeat on a node whose ranks others wait for. If no rank waits, only its monitor may be gone."""
    ranks = tuple(
        q
        for q in sorted(graph.sinks)
        if (r := s.ranks.get(q)) is not None and r.life == Life.SILENT and (r.heartbeat_age_s or 0.0) >= limits.silent_s
    )
    victims = sorted({v for q in ranks for v in graph.victims_of(q) if s.ranks[v].blocked is not None})
    since = [b.entered_s for v in victims if (b := s.ranks[v].blocked) and b.entered_s is not None]
    if since and s.t_s - min(since) >= limits.silent_s:
        yield _silent_finding(s, ranks, victims)


# -- wording ----------------------------------------------------------------------------------------------------------

_NATIVE_CRASHES = {signals.SIGABRT, signals.SIGSEGV, signals.SIGBUS, signals.SIGILL, signals.SIGFPE}
_KILLED_ADVICE = {
    "SIGKILL": "look for the out-of-memory killer: `dmesg -T | grep -i oom`; else find who sent it",
    "SIGSEGV": "a native crash: run once with `python -X faulthandler` and check the extension called there",
    "SIGBUS": "a full /dev/shm or a truncated mapped file: check `df /dev/shm`",
}


def _lost(facts: Facts) -> Finding:
    s, culprits = facts.snapshot, tuple(sorted(facts.cascade.ranks))
    first = s.ranks[facts.cascade.ranks[0]]
    victims = facts.cascade.others
    who = rank_list(culprits)
    state = "killed" if first.life == Life.KILLED else "crashed"
    echoes = {q for q, k in facts.ends.items() if k in ("echo", "timeout") and q not in culprits}
    if first.life == Life.KILLED:
        name = signals.Signals(first.signal).name if first.signal else "a signal"
        message = f"{who} {'was' if len(culprits) == 1 else 'were'} killed by {name}{at(first.current_site)}"
        advice = _KILLED_ADVICE.get(
            name, "read the rank's own stderr above: what did the library print before the rank died?"
        )
    else:
        message = f"{who} ended by {shortened(first.exception or f'exit code {first.exit_code}', 200)}{at(first.current_site)}"
        advice = f"fix {site_text(first.current_site) or 'the exception'}"
        if _WORKER.search(first.exception or ""):  # raised wherever the main thread is
            advice = "read what the DataLoader's worker printed before it ended (code or signal above), or run once with num_workers=0"
        if echoes:
            advice += "; the other ranks' errors follow from it"
        condition = parting.enclosing(first.current_site, facts.source) if not first.exception else None
        if condition is not None:
            message += f", under `{condition.text}` at line {condition.line}"
            advice = f"find why `{condition.text.removeprefix('if ')}` held on {who}" + (
                ", and let all ranks leave together (all_reduce the decision)" if victims else ""
            )
        if UNUSED.search(first.exception or ""):
            advice = (
                "use the output of every parameter in the loss, freeze those that are not used before DDP, or pass "
                "find_unused_parameters=True"
            )
    together = [s.ranks[q] for q in facts.cascade.ranks]
    return Finding(
        kind=kind.name,
        cause=state,
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=victims,
        where=tuple(w for r in together for w in where_stack(r, r.user_stack, state, 3)),
        waiting=tuple(where(r) for r in s.ranks.values() if r.rank in victims and (r.blocked or r.rank in echoes)),
        step=first.step,
        first_seen_s=first.ended_s if first.ended_s is not None else s.t_s,
        message=message,
        cost="the job cannot continue without it" if victims else "the job ended",
        advice=advice,
    )


def _at_exit(crashed: list[RankState]) -> Finding:
    ranks = tuple(sorted(r.rank for r in crashed))
    first = min(crashed, key=lambda r: (r.ended_s or 0.0, r.rank))
    return Finding(
        kind=kind.name,
        cause="killed",
        certainty=Certainty.PROVED,
        severity=Severity.WARNING,
        culprits=ranks,
        step=first.step,
        first_seen_s=first.ended_s,
        message=f"{rank_list(ranks)} finished the script, then {signals.Signals(first.signal or 0).name} ended the process "
        "while Python shut down",
        cost="the job's work is done, but the launcher reports it as failed",
        advice="call dist.destroy_process_group() at the end, and join your own threads before it: a thread that is inside "
        "C++ code while Python shuts down aborts the process; the first line of the rank's stderr names what aborted",
    )


def _echoes(s: Snapshot, ranks: tuple[int, ...]) -> Finding:
    """Return the finding of a job in which every rank failed because another was gone, and the first end is not known."""
    failed = [s.ranks[q] for q in ranks]
    first = min(failed, key=lambda r: r.ended_s if r.ended_s is not None else s.t_s)
    return Finding(
        kind=kind.name,
        cause="crashed",
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        victims=ranks,
        where=tuple(w for r in failed for w in where_stack(r, r.user_stack, "crashed", 2)),
        first_seen_s=first.ended_s,
        message=f"{rank_list(ranks)} failed because another rank was gone; the first known end is that of rank "
        f"{first.rank}: {(first.exception or '').splitlines()[0][:160] if first.exception else 'no exception'}{at(first.current_site)}",
        cost="the job ended",
        advice="read the ranks' own stderr from the top: the first error in it is the cause",
    )


def _unconnected(s: Snapshot, ranks: tuple[int, ...]) -> Finding:
    """Return the finding of ranks that never completed a first collective: no culprit is known."""
    tried: list[RankState] = [s.ranks[q] for q in ranks]
    first = tried[0]
    return Finding(
        kind=kind.name,
        cause="crashed",
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        victims=ranks,
        where=tuple(w for r in tried for w in where_stack(r, r.user_stack, None, 2)),
        first_seen_s=min((r.ended_s for r in tried if r.ended_s is not None), default=None),
        message=f"{rank_list(ranks)} could not connect: {(first.exception or '').splitlines()[0][:160]}{at(first.current_site)}",
        cost="the job did not start",
        advice="check that every rank started, and that its address and port are reachable from the others; "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface; `distdiag doctor --reach HOST:PORT` tries it",
    )


def _silent_finding(s: Snapshot, ranks: tuple[int, ...], victims: list[int]) -> Finding:
    hosts = ", ".join(dict.fromkeys(s.ranks[q].host or f"node {s.ranks[q].node}" for q in ranks))
    silent_s = max(s.ranks[q].heartbeat_age_s or 0.0 for q in ranks)
    return Finding(
        kind=kind.name,
        cause="silent",
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=ranks,
        victims=tuple(victims),
        where=tuple(where(s.ranks[q]) for q in ranks),
        waiting=tuple(where(s.ranks[v]) for v in victims),
        first_seen_s=s.t_s - silent_s,
        message=f"{rank_list(ranks)} ({hosts}) {'has' if len(ranks) == 1 else 'have'} sent no heartbeat for "
        f"{rough_duration(silent_s)}; {rank_list(victims)} {'waits' if len(victims) == 1 else 'wait'} for "
        f"{'it' if len(ranks) == 1 else 'them'}",
        cost=f"{len(victims)} of {s.world_size} ranks make no progress",
        advice="check that the host is up and still sees the run directory; look at its console and its network",
    )
