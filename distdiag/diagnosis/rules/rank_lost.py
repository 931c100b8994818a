"""rank_lost: a rank was killed, crashed, or went silent while the job continues, and nothing in the job explains it.

If several ranks ended, the first end that no other end explains is the cause; see `endings`.
Idle workers that their launcher ends are no lost ranks, either.
"""

from __future__ import annotations

import ast
import re
import signal as signals
from collections.abc import Iterator
from dataclasses import dataclass

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import paths
from distdiag.diagnosis.endings import UNUSED, Cascade, End, unset_key
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.known_errors import known
from distdiag.diagnosis.model import syntax
from distdiag.diagnosis.model.findings import ATTEMPT, Abstained, Finding, Severity, at_least, rank_list
from distdiag.diagnosis.model.guards import GuardKind, on_stack
from distdiag.diagnosis.model.snapshot import Life, RankState, Site, Snapshot
from distdiag.diagnosis.model.syntax import line_at
from distdiag.diagnosis.polled import set_at
from distdiag.diagnosis.text.phrases import at, connect_advice, shortened, site_text, where_stack, wheres
from distdiag.diagnosis.text.template import Template
from distdiag.diagnosis.waits.delays import waiting_since
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.terms.signals import NATIVE_CRASHES, signal_name
from distdiag.terms.units import counted

kind = kinds.RANK_LOST


@dataclass(frozen=True)
class Limits:
    silent_s: float = 30.0
    """Seconds without a heartbeat while others wait. A network file system may show files seconds late."""


limits = Limits()
_SENT = {signals.SIGUSR1, signals.SIGUSR2, signals.SIGTERM, signals.SIGHUP, signals.SIGINT}
_EXITS = re.compile(r"(?i)exit|\bquit\b|\babort\b")  # in the line of a rank that ended by its own choice
KILLED = Template(kind, "killed", "{culprits} {culprits:was|were} killed by {signal}{seen}{site}", "{cost}", "{do}",
    proved=True)  # fmt: skip
CRASHED = Template(kind, "crashed", "{culprits} ended with {how}{site}{condition}", "{cost}", "{do}", proved=True)
LEFT = Template(kind, "crashed", "{culprits} left with {how}{site}{condition}, and the launcher starts the ranks again: {restarts}", "this attempt ended",
    "nothing, if {culprits:it leaves|they leave} to be started again; else {do}", proved=True, severity=Severity.INFO)  # fmt: skip
AT_EXIT = Template(kind, "killed",
    "{culprits} finished the script, then {signal} ended the process while Python shut down",
    "the job's work is done, but the launcher reports it as failed",
    "call dist.destroy_process_group() at the end, and join your own threads before it: a thread that is inside "
    "C++ code while Python shuts down aborts the process; the first line of the rank's stderr names what aborted",
    proved=True, severity=Severity.WARNING)  # fmt: skip
ECHOES = Template(kind, "crashed",
    "{victims} failed because another rank was gone; the first known end is that of rank {first}: {error}{site}",
    "the job ended", "read the ranks' own stderr from the top: the first error in it is the cause")  # fmt: skip
UNCONNECTED = Template(kind, "crashed", "{victims} could not connect: {error}{site}", "the job did not start", "{do}",
    proved=True)  # fmt: skip
SILENT = Template(kind, "silent",
    "{culprits} ({hosts}) {culprits:has|have} not been heard of{heard} ({silent_s:time}); {victims} "
    "{victims:waits|wait} for {culprits:it|them}", "{victims:#} of {world} ranks make no progress",
    "check that the host is up, and its network: it may be alive")  # fmt: skip
_DO = {
    "SIGKILL": "look for the out-of-memory killer: `dmesg -T | grep -i oom`; else find who sent it",
    "SIGSEGV": "a native crash: run once with `python -X faulthandler` and check the extension called there",
    "SIGBUS": "a full /dev/shm or a truncated mapped file: check `df /dev/shm`",
    "signal": "read the rank's own stderr above: what did the library print before the rank died?",
    "sent": "another process sent it, and the rank had no handler for it: batch systems warn a job in this way before its time ends (Slurm: "
    "`--signal`); set the handler first of all in the script, or find who sent it",
    "exit": "search the script for what exits with this code; started by `-m distdiag.run`, the verdict has its line",
    "chosen": "look for what ends the process with that code: os._exit({0}), or sys.exit({0}), in another thread, in what that line calls, or in a library",
    "called": "find why os._exit({0}){1} ran: it ends the process from any thread, without an exception; a guard that found this rank too slow or idle "
    "needs a longer limit, or a pause while the rank waits for others",
    "only": "; only {0} failed there: see what is different on it (its batch, its files, its device)",
    "key": "find why {0} did not run in time: a thread that an exception had ended (a Future keeps it until `result()` is called), "
    "a branch that was not taken, a rank that was late; only for that one a longer timeout helps",
    "unused": "use the output of every parameter in the loss, freeze those that are not used before DDP, or pass "
    "find_unused_parameters=True",
}


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    s, cascade = facts.snapshot, facts.cascade
    failed = any(at_least(f.severity, Severity.ERROR) for f in (*facts.reported, *facts.found))
    if cascade.end is End.LOST:
        yield _lost(facts)
    elif cascade.end is End.UNCONNECTED or (cascade.end is End.ECHOES and not failed):
        yield _of_unknown_cause(s, cascade)
    stalled = any(f.kind == kinds.STALL.name for f in facts.reported)
    ended = cascade.end in (End.LOST, End.ECHOES, End.UNCONNECTED)
    if facts.stopped or (stalled and facts.ends) or ended:
        return
    yield from _silent(s, facts.graph)
    # a failure for the launcher: the script ended normally, and the process then crashed natively
    crashed = [r for r in s.ranks.values() if r.life == Life.FINISHED and r.signal in NATIVE_CRASHES]
    if crashed and not failed:
        first = min(crashed, key=lambda r: (r.ended_s or 0.0, r.rank))
        signal = signal_name(first.signal or 0)
        culprits = sorted(r.rank for r in crashed)
        yield AT_EXIT(culprits=culprits, step=first.step, first_seen_s=first.ended_s, signal=signal)


def _silent(s: Snapshot, graph: WaitGraph) -> Iterator[Finding]:
    """Yield ranks without heartbeat on a node whose ranks others wait for. If no rank waits, only its monitor may be gone."""
    states = (s.ranks[q] for q in sorted(graph.sinks) if q in s.ranks)
    ages = {r.rank: r.heartbeat_age_s or 0.0 for r in states if r.life == Life.SILENT}
    silent = {q: age_s for q, age_s in ages.items() if age_s >= limits.silent_s}
    victims = waiting_since(s, graph, silent)
    since = [t for t in victims.values() if t is not None]
    if since and s.t_s - min(since) >= limits.silent_s:
        hosts = ", ".join(dict.fromkeys(s.ranks[q].host or f"node {s.ranks[q].node}" for q in silent))
        yield SILENT(
            culprits=silent, victims=victims, where=wheres(s, silent), waiting=wheres(s, victims), hosts=hosts,
            heard=f" since {heard}" if (heard := min(s.ranks[q].heard_at for q in silent)) else "",
            first_seen_s=s.t_s - max(silent.values()), silent_s=max(silent.values()), world=s.world_size,
        )  # fmt: skip


def _lost(facts: Facts) -> Finding:
    s, culprits, victims = facts.snapshot, sorted(facts.cascade.ranks), facts.cascade.others
    first = s.ranks[facts.cascade.ranks[0]]
    killed = first.life == Life.KILLED
    signal = signal_name(first.signal) if first.signal else "a signal"
    echoes = {q for q, k in facts.ends.items() if k in ("echo", "timeout") and q not in culprits}
    code = "" if killed or first.exception else line_at(first.current_site, facts.source)
    elsewhere = bool(code) and not _EXITS.search(code)  # another thread ended the process
    left = paths.enclosing(first.current_site, facts.source) if code and not elsewhere else None
    exits = _exit_call(facts, first) if elsewhere else None
    state = "killed" if killed else "crashed"
    shown = (known(first) or ("",))[0]
    condition = f", under `{left.text}` at line {left.line}" if left is not None else f"; {shown}" if shown else ""
    if elsewhere:
        condition = f" and no exception; its main thread was last seen{at(first.current_site)}"
        condition += f"; {site_text(exits)} calls os._exit({first.exit_code})" if exits is not None else ""
    of_memory = (f for f in facts.reported if (f.kind, f.cause) == (kinds.MEMORY.name, "growth"))
    growing = any(first.rank in f.culprits for f in of_memory)
    grown = growing and (elsewhere or first.signal == signals.SIGKILL)
    condition += "; its memory had been growing" if grown else ""
    if unset_key(first):
        setter = site_text(_setter(facts, first))
        condition += f"; nobody had set that key{f', as {setter} does' if setter else ''}"
    by_choice = bool(code) and not elsewhere and _left(facts, first)
    restarts = f"{counted(s.restarts_left, 'restart')} left"
    ended = "the job cannot continue without it" if victims else "the job ended"
    # only a crash in native code, and a call that it did not leave, have their line; else the newest sample may be older than the end
    sampled = killed and first.current_site is not None and not (first.ended_waiting or first.signal in NATIVE_CRASHES)
    return (KILLED if killed else LEFT if by_choice and s.restarts_left > 0 else CRASHED)(
        culprits=culprits, victims=victims,
        where=(w for q in facts.cascade.ranks for w in where_stack(s.ranks[q], s.ranks[q].user_stack, state, 3)),
        waiting=wheres(s, (q for q, r in s.ranks.items() if q in victims and (r.blocked or r.ended_waiting or q in echoes))),
        step=first.step, first_seen_s=first.ended_s if first.ended_s is not None else s.t_s, signal=signal,
        how=shortened(first.exception or f"exit code {first.exit_code}", 200),
        site=None if elsewhere else first.current_site, seen=", last seen" if sampled else "", condition=condition,
        cost=ended if s.restarts_left <= 0 else f"{ATTEMPT}{s.attempt} ended; the launcher starts all ranks again ({restarts})",
        restarts=restarts,
        do=("see first what lets its memory grow (the finding on memory); else " if grown else "") + (
            _DO["chosen" if exits is None else "called"].format(first.exit_code, at(exits)) if elsewhere
            else _repair(facts, first, echoes, left) if not killed
            else _DO.get(signal, _DO["sent" if first.signal in _SENT else "signal"])
        ),
    )  # fmt: skip


def _left(facts: Facts, first: RankState) -> bool:
    """True if no rank failed but those that left by the line of `first`, which is in no handler of an exception."""
    causes = {
        (r.current_site, r.exception) for q, k in facts.ends.items() if k == "cause" and (r := facts.snapshot.ranks[q])
    }
    around = on_stack(first.user_stack, facts.source)
    handled = any(g.kind is GuardKind.HOLDS and isinstance(g.node, ast.ExceptHandler) for g in around)
    return causes == {(first.current_site, None)} and not handled


def _repair(facts: Facts, first: RankState, echoes: set[int], left: paths.Condition | None) -> str:
    """Return what to do about an exception, or about an exit under a condition."""
    text, culprits, victims = first.exception or "", facts.cascade.ranks, facts.cascade.others
    if UNUSED.search(text):
        return _DO["unused"]
    if unset_key(first):
        setter = site_text(_setter(facts, first))
        return _DO["key"].format(setter or "what sets that key (search for its name)")
    if left is not None:
        together = ", and let all ranks leave together (all_reduce the decision)" if victims else ""
        return f"find why `{left.text.removeprefix('if ')}` held on {rank_list(culprits)}{together}"
    site, line = first.current_site, shortened(line_at(first.current_site, facts.source), 80)
    if (row := known(first)) is not None:
        do = row[1]
    elif text or site:
        tested = paths.enclosing(site, facts.source) if line.startswith("raise") else None
        do = f"fix `{line}`{at(site)}" if line else f"fix {site_text(site) or 'the exception'}"
        if tested is not None:
            do = f"find why `{tested.text.removeprefix('if ')}`{at(tested.site)} held on {rank_list(culprits)}"
        do += _DO["only"].format(rank_list(culprits)) if text and len(culprits) == 1 and victims else ""
    else:
        do = _DO["exit"]
    return do + ("; the other ranks' errors follow from it" if echoes else "")


def _exit_call(facts: Facts, first: RankState) -> Site | None:
    """Return the only call of os._exit with a rank's exit code in the files of its frames; sys.exit ends only its own thread."""
    calls = syntax.calls_in(sorted({site.file for site in first.user_stack}), facts.source)
    exits = ((x.args[0], site) for x, site in calls if syntax.name_of(x.func) == "_exit" and x.args)
    found = {site for code, site in exits if isinstance(code, ast.Constant) and code.value == first.exit_code}
    return found.pop() if len(found) == 1 else None


def _setter(facts: Facts, first: RankState) -> Site | None:
    return set_at(unset_key(first), facts.snapshot.ranks.values(), facts.source)


def _of_unknown_cause(s: Snapshot, cascade: Cascade) -> Finding:
    """Return the finding of ranks that lost another, or could not connect: no culprit is known."""
    echoes = cascade.end is End.ECHOES
    failed = [s.ranks[q] for q in cascade.others]
    times = [r.ended_s for r in failed if r.ended_s is not None]
    first = min(failed, key=lambda r: r.ended_s if r.ended_s is not None else s.t_s) if echoes else failed[0]
    sites = (w for r in failed for w in where_stack(r, r.user_stack, "crashed" if echoes else None, 2))
    return (ECHOES if echoes else UNCONNECTED)(
        victims=cascade.others, where=sites, first_seen_s=min(times, default=None), first=first.rank,
        error=shortened((first.exception or "no exception").partition("\n")[0], 200),
        site=first.current_site, do=connect_advice(s),
    )  # fmt: skip
