"""stall: ranks wait for one that is alive and busy, unusually long for this job. Suspected; cleared
if it continues.

Ranks that wait at the same line for the same thing (a lock, a key of a store, a file that does not
appear) are one finding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from distdiag.diagnosis import kinds
from distdiag.diagnosis.comparison import vetoed
from distdiag.diagnosis.culprit import paths, pending_exception
from distdiag.diagnosis.facts import Facts
from distdiag.diagnosis.model.findings import Abstained, Finding, Severity, Where, rank_list
from distdiag.diagnosis.model.guards import GuardKind, on_stack
from distdiag.diagnosis.model.snapshot import DEAD, Call, Life, RankState, Site, Snapshot
from distdiag.diagnosis.model.syntax import Source, line_at
from distdiag.diagnosis.pauses import validates
from distdiag.diagnosis.polled import (
    behind,
    caught_around,
    hidden_error,
    keys_differ,
    keys_text,
    left_unwritten,
    nobody_sets,
    polled_loop,
)
from distdiag.diagnosis.text import stall as wording
from distdiag.diagnosis.text.conditions import conditions_text, decision_advice, kept_text, left_text
from distdiag.diagnosis.text.incident import implicit_text, verb
from distdiag.diagnosis.text.phrases import (
    NO_PROGRESS,
    at,
    connect_advice,
    op_text,
    where,
    where_stack,
    wheres,
    worker_text,
    workers_of,
)
from distdiag.diagnosis.text.template import filled
from distdiag.diagnosis.threads import Open, ended_thread, filled_by, left_open, other_end
from distdiag.diagnosis.training_data import UNSEEN
from distdiag.diagnosis.waits.delays import incomplete, kept_waiting, motionless_s, outpaced
from distdiag.diagnosis.waits.graph import WaitGraph
from distdiag.diagnosis.waits.uncounted import unseen
from distdiag.terms.activity import ACTIVITIES, by_line, refined
from distdiag.terms.operations import op_name
from distdiag.terms.ranks import by_value
from distdiag.terms.signals import signal_name
from distdiag.terms.sites import line_text
from distdiag.terms.units import rough_duration, size_text

kind = kinds.STALL
_PATIENCE_S = {a.word: a.patience_s for a in ACTIVITIES if a.patience_s} | {"validation": 60.0}


@dataclass(frozen=True)
class Limits:
    patience_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType(_PATIENCE_S))
    """Seconds that the others may wait for a rank, by what it does. Nobody answers a prompt of a
    batch job; a checkpoint to a slow disk may be slow. What a rank computes, or another
    program for it, under a condition on the rank while the others wait in a barrier, or in a
    broadcast of its result, counts as a validation."""
    long_s: float = 60.0
    """The same in two other cases. A rank still makes steps, and has made more than all ranks that wait for it. Or no rank
    moves and none waits for another, while all hosts sleep or wait for their devices."""
    start_s: tuple[tuple[int, float], ...] = ((4, 60.0), (32, 30.0))
    """(fewer collectives than this, seconds) before the first step: compilation, lazy
    initialisation, unpickling or building an index (which may hold the GIL). A job that makes no steps has no
    torch optimizer."""
    asleep_pct: float = 4.0
    """CPU in per cent of a core below which a rank counts as asleep: its recorder alone uses up to
    2."""
    factor: float = 3.0
    """Multiple of the usual step, or of the longest wait that this rank has caused so far without
    hanging, that the patience is at least. A stall is an error after the same multiple of its
    patience."""
    nobody_busy_s: float = 300.0
    """Seconds in which no rank moves and none waits for another, if a host computes: a compilation
    shows one line, too."""
    together: float = 0.8
    """Ranks at the line of a rank that exceeds its patience are named with it, once the others have
    waited this share of it."""


limits = Limits()
_FILE_LOCK = re.compile(r"(?i)file_?lock|flock|lockf")
_DUTIES = ("user_code", "process", "sleep", "checkpoint", "socket", "device")
_SLOW_AT_START = ("user_code", "data", "sleep", "socket", "store_key", "lock", "gil_held")
_CAUSE = {"data": "data", "gil_held": "gil_held", "checkpoint": "checkpoint"}


@dataclass(frozen=True)
class _Late:
    """One living rank that others wait for."""

    state: RankState
    victims: list[int]
    waited_s: float
    limit_s: float


def evaluate(facts: Facts) -> Iterator[Finding | Abstained]:
    """Yield the living ranks that others have waited for unusually long, one stall for each line."""
    if facts.stopped:
        yield Abstained("another finding has already stopped the job", checked=True)
        return
    stalled = [f for f in facts.reported if f.kind == kind.name]
    if stalled and (facts.ends or facts.no_progress_since_wait or facts.repeated):
        yield from stalled  # as reported: ranks that are ending give no new evidence
        return
    s, graph = facts.snapshot, facts.graph
    if not graph.sinks:
        ended = all(r.life in DEAD for r in s.ranks.values())  # what was judged before says more
        reason = "the job has ended" if ended else "no rank is waited for by the others"
        yield vetoed((UNSEEN,), s) or Abstained(reason, checked=not ended)
    yield from list(_incomplete(facts)) or list(_not_connected(s, graph)) or _nobody_moves(facts)
    if (start := unseen_wait(s, graph)) is not None:
        yield _not_joined(s, *start)
    late: list[_Late] = []
    for rank in graph.sinks:
        state = s.ranks.get(rank)
        if state is None or state.life not in (Life.RUNNING, Life.STARTING):
            continue
        if groups := unseen(s, state):
            yield Abstained(
                f"rank {rank}'s host waits for its device, and nothing shows which operations of group {groups[0]} "
                f"({s.groups[groups[0]].backend}) that has completed: it may be busy, or wait for another rank"
            )
        elif (kept := kept_waiting(s, graph, rank)) is not None:
            late.append(_Late(state, *kept, _limit_s(facts, state, *kept)))
    named: set[int] = set()
    # a rank that is asked to end may unwind for long: the others had begun to wait for what it did before
    before = [x for x in late if facts.interrupted_s is None or s.t_s - x.waited_s >= facts.interrupted_s]
    for together in _by_line(before):
        named |= {x.state.rank for x in together}
        yield _finding(facts, together)
    for x in late:
        if x.state.rank not in named:
            reason = waits_for(x.victims, x.state, x.waited_s, x.limit_s)
            yield _trains_on(facts, x.state) or Abstained(reason, checked=True)


def unseen_wait(s: Snapshot, graph: WaitGraph) -> tuple[list[int], Call, list[int], float] | None:
    """Return (ranks never seen, the call in which others wait only for such, those others, for how long they have waited).

    The call is `init_process_group`: had all of them come, it would be over. Those of another node are seen only
    afterwards, so of several it is not known which has come.
    """
    for wait in graph.waits:
        call = next((c for q, c in wait.calls.items() if q in wait.ranks and c.op == "init_process_group"), None)
        if call is not None and wait.missing and wait.missing.isdisjoint(s.ranks):
            kept = kept_waiting(s, graph, min(wait.missing))
            return (sorted(wait.missing), call, *kept) if kept is not None else None
    return None


def unseen_text(ranks: list[int], call: Call, victims: list[int], waited_s: float, waits: str = "waited") -> str:
    """Return `ranks 0, 1 waited in init_process_group(), at train.py:5 in main, for rank 2, which was never seen, for 30 s`."""
    seen = verb(ranks, "was", "were")
    place = f"{op_text(call)},{at(call.site)}," if call.site is not None else op_text(call)
    return f"{rank_list(victims)} {waits} in {place} for {rank_list(ranks)}, which {seen} never seen,{_how_long(waited_s, _start_s(0))}"


def _not_joined(s: Snapshot, ranks: list[int], call: Call, victims: list[int], waited_s: float) -> Finding | Abstained:
    if waited_s < _start_s(0):
        return Abstained(unseen_text(ranks, call, victims, waited_s, verb(victims, "waits", "wait")))
    return wording.NOT_JOINED(
        severity=Severity.ERROR if waited_s > limits.factor * _start_s(0) else Severity.WARNING, culprits=ranks, victims=victims,
        collective=call, waiting=wheres(s, victims), first_seen_s=s.t_s - waited_s, waited_s=waited_s, at_call=call.site,
    )  # fmt: skip


def _not_connected(s: Snapshot, graph: WaitGraph) -> Iterator[Finding]:
    """Yield the stall of a job all of whose ranks have come to `init_process_group`, or to the first call of a group made again."""

    def connects(c: Call) -> bool:
        return c.op == "init_process_group" or (c.seq == 1 and "#" in (c.group or ""))

    calls = [c for w in graph.waits if len(w.ranks) == s.world_size for c in w.calls.values() if connects(c)]
    since_s = max((c.entered_s for c in calls if c.entered_s is not None), default=s.t_s)
    if (waited_s := s.t_s - since_s) >= _start_s(0):
        yield wording.NOT_CONNECTED(
            severity=Severity.ERROR if waited_s > limits.factor * _start_s(0) else Severity.WARNING, victims=sorted(s.ranks), collective=calls[0],
            waiting=wheres(s, s.ranks), first_seen_s=since_s, waited_s=waited_s, at_call=calls[0].site, do=connect_advice(s),
        )  # fmt: skip


def _by_line(late: list[_Late]) -> Iterator[list[_Late]]:
    """Yield the ranks that exceed their patience, those at one line together, the longest wait first.

    At one line all do the same, although one may look asleep and another busy: the shortest patience counts.
    """
    groups: dict[object, list[_Late]] = {}
    for x in late:
        groups.setdefault(x.state.current_site or x.state.rank, []).append(x)
    for group in groups.values():
        limit_s = min((x.limit_s for x in group if x.waited_s >= x.limit_s), default=None)
        if limit_s is not None:
            together = (x for x in group if x.waited_s >= limits.together * limit_s)
            yield sorted(together, key=lambda x: (x.waited_s < x.limit_s, -x.waited_s))


def _trains_on(facts: Facts, r: RankState) -> Finding | None:
    """Return the stall of ranks that wait for one that still makes steps; None if the wait is not unusual."""
    found = outpaced(facts.snapshot, facts.graph, r.rank)
    if found is None or found[1] < max(limits.long_s, limits.factor * r.longest_delay_s):
        return None
    victims, waited_s, ahead = found
    stack = r.phase_stacks.get("backward") or r.phase_stacks.get("optimizer") or r.user_stack
    s = facts.snapshot
    call = s.ranks[victims[0]].blocked
    assert call is not None
    return wording.TRAINS_ON(
        culprits=(r.rank,), victims=victims, collective=call, where=where_stack(r, stack, "user_code"),
        waiting=wheres(s, victims), step=r.step, first_seen_s=s.t_s - waited_s, called_at=call.site,
        ahead=ahead, waited_s=waited_s, world=s.world_size,
    )  # fmt: skip


def _incomplete(facts: Facts) -> Iterator[Finding]:
    """Yield operations that all their ranks have issued on their devices and that do not complete."""
    s = facts.snapshot
    for calls, since_s in incomplete(s, facts.graph):
        ranks = sorted(calls)
        started = any(s.ranks[r].step or s.ranks[r].steps for r in ranks)
        start_s = 0.0 if started else _start_s(min(len(s.ranks[r].calls) for r in ranks))
        limit_s = max(limits.patience_s["device"], start_s, limits.factor * (s.usual_step_s or 0.0))
        waited_s = s.t_s - since_s
        if waited_s < limit_s:
            continue
        first = calls[ranks[0]]
        issued = f"{rank_list(ranks)} have all issued {op_text(first)}{at(first.site)}, and it has"
        if first.p2p:
            ends = (f"rank {q} has issued {op_text(calls[q])}{at(calls[q].site)}" for q in ranks[:2])
            issued = f"{' and '.join(ends)}, and the message has"
        yield wording.INCOMPLETE(
            severity=Severity.ERROR if waited_s > limits.factor * limit_s else Severity.WARNING,
            victims=ranks, collective=first,
            waiting=wheres(s, ranks, "waiting", {q: call.site for q, call in calls.items()}),
            step=max(s.ranks[r].step for r in ranks), first_seen_s=since_s, issued=issued, waited_s=waited_s,
        )  # fmt: skip


def _nobody_moves(facts: Facts) -> Iterator[Finding]:
    """Yield the stall of a job in which no rank moves, although none is known to wait for another."""
    s = facts.snapshot
    still_s = motionless_s(s) if not facts.graph.sinks else None
    ranks = list(s.ranks.values())
    idle = all(r.host_blocked or r.host_wait is not None or r.store_key for r in ranks)
    sets = _unset(facts, still_s or 0.0)
    # nobody is left to set a key: that is an error, which takes a multiple of the patience
    still = limits.long_s if idle else limits.nobody_busy_s
    least_s = limits.factor * limits.patience_s["store_key"] if sets else still
    limit_s = max(least_s, limits.factor * (s.usual_step_s or 0.0))
    naps = any(not r.store_key and "sleep(" in line_at(r.current_site, facts.source) for r in ranks)
    if still_s is None or still_s < limit_s or naps:
        return
    if sets and (found := behind(ranks)) is not None:
        yield _key_left_out(facts, *found, still_s)
        return
    opened = {r.rank: x for r in ranks if (x := left_open(facts, r)) is not None}
    at_site = [*by_value({r.rank: (r.current_site, _open_text(opened.get(r.rank))) for r in ranks}).items()][:4]
    places = (
        f"{rank_list(q)} {verb(q, 'is', 'are')}{at(site) or ' at an unknown line'}{more}" for (site, more), q in at_site
    )
    in_turn = bool(opened) and all({*x.missing} <= opened.keys() for x in opened.values())
    if sets:
        places = (keys_text([s.ranks[q] for q in group], ranks) for _, group in at_site)
    yield wording.NOBODY_MOVES(
        victims=sorted(s.ranks), where=map(where, ranks), step=max(r.step for r in ranks),
        first_seen_s=s.t_s - still_s, still_s=still_s, places="; ".join(places),
        severity=sets, unknown="" if opened else ", and none is known to wait for another",
        do=(wording.DO_KEYS if keys_differ(ranks, ranks, s.world_size) else wording.DO_NO_KEY) if sets
        else wording.DO_ORDER if in_turn else _open_advice(*next((s.ranks[q], x) for q, x in opened.items())) if opened
        else wording.DO_DUMP,
    )  # fmt: skip


def _key_left_out(facts: Facts, late: RankState, waiting: RankState, still_s: float) -> Finding:
    """Return the finding of a rank that has left out a key in a round in which the others have set theirs."""
    ranks = [r for r in facts.snapshot.ranks.values() if r is not late]
    caught = caught_around(late.user_stack, facts.source)
    why = f"an error that `{caught[0]}`{at(caught[1])} caught" if caught is not None else "an error that it caught"
    return wording.KEY_LEFT_OUT(
        severity=Severity.ERROR, culprits=(late.rank,), victims=[r.rank for r in ranks], step=late.step, first_seen_s=facts.snapshot.t_s - still_s,
        where=(where(late, None, late.store_set_site), *where_stack(late, late.user_stack, "store_key")), waiting=map(where, ranks),
        key=waiting.store_key, waits=rank_list([waiting.rank]), at_wait=at(waiting.current_site), last=late.store_set, at_last=at(late.store_set_site),
        own=late.store_key, at_own=at(late.current_site), still_s=still_s, why=why,
    )  # fmt: skip


def waits_for(victims: Sequence[int], late: RankState, waited_s: float, limit_s: float | None = None) -> str:
    """Return `rank 0 waits for rank 1, at train.py:5 in poll, for 57 s (judged from 60 s on)`."""
    limit_s = patience_s(late) if limit_s is None else limit_s
    return f"{rank_list(victims)} {verb(victims, 'waits', 'wait')} for {_placed([late])}{_how_long(waited_s, limit_s)}"


def waited_for(victims: Sequence[int], late: Sequence[RankState], waited_s: float) -> str:
    """Return `rank 0 waited for ranks 1, 2, at train.py:5 in poll, for 57 s (judged from 60 s on)`; the late ones are at one line."""
    return f"{rank_list(victims)} waited for {_placed(late)}{_how_long(waited_s, patience_s(late[0]))}"


def _placed(late: Sequence[RankState]) -> str:
    """Return `ranks 1, 2, at train.py:5 in poll,`."""
    place = f",{at(late[0].current_site)}," if late[0].current_site is not None else ""
    return rank_list([r.rank for r in late]) + place


def _how_long(waited_s: float, limit_s: float) -> str:
    """Return ` for 57 s (judged from 60 s on)`."""
    judged = f" (judged from {rough_duration(limit_s)} on)" if waited_s < limit_s else ""
    return f" for {rough_duration(waited_s)}{judged}"


def _limit_s(facts: Facts, r: RankState, victims: Sequence[int], waited_s: float) -> float:
    """Return `patience_s`; more for a rank that works under a condition on the rank while the others wait for it on purpose.

    They are in a barrier, or in a broadcast of its result: drawing, scoring, an export, an upload by another program. So is a nap; one
    in a loop is the pause between tries, which may never end.
    """
    limit_s, duty_s = patience_s(r), limits.patience_s["validation"]
    states = [facts.snapshot.ranks[v] for v in victims]
    if not limit_s <= waited_s < duty_s or not all(_on_purpose(v, r.rank) for v in states):
        return limit_s
    doing, site = refined(_doing(r), line_at(r.current_site, facts.source)), r.current_site
    tries = site is not None and any(g.kind is GuardKind.INSIDE for g in on_stack((site,), facts.source))
    if doing not in ("user_code", "process") and (doing != "sleep" or tries):
        return limit_s
    guard = paths.rank_condition(r.user_stack, states[0].user_stack, facts.source)
    return duty_s if guard is not None and guard.way is paths.Way.ALONE else limit_s


def _on_purpose(victim: RankState, late: int) -> bool:
    """True if a rank waits in a barrier, or for what the late one hands out; not in DDP's own broadcast of buffers."""
    call = victim.blocked
    if call is None or implicit_text(victim, call):
        return False
    return call.op == "barrier" or (call.root == late and op_name(call.op) in ("broadcast", "scatter"))


def patience_s(r: RankState) -> float:
    """Return the seconds that others may wait for this rank, by what it does and has done before."""
    doing = _doing(r)
    in_eval = r.phase == "validate" or any(m.evaluating for m in r.models)
    if doing in ("user_code", "sleep") and (in_eval or validates(r.user_stack)):
        doing = "validation"
    base = limits.patience_s.get(doing, limits.patience_s["user_code"])
    if not r.steps and r.step == 0 and doing in _SLOW_AT_START:
        base = max(base, _start_s(len(r.calls)))
    return max(base, limits.factor * r.longest_delay_s)


def _start_s(calls: int) -> float:
    """Return the least patience, in seconds, for a job without a step yet, by its number of collectives."""
    return next((seconds for fewer, seconds in limits.start_s if calls < fewer), 0.0)


def _doing(r: RankState) -> str:
    asleep = r.activity == "user_code" and r.host_blocked and (r.cpu_pct or 0.0) < limits.asleep_pct
    return "sleep" if asleep else r.activity


def _never_joined(facts: Facts, late: Sequence[_Late], opened: Open, does: str) -> Finding | None:
    """Return the finding of ranks that are missing in what the threads of the late ranks wait in, if they are known to be wrong.

    They wait for the late ranks themselves, and are fewer, or a thread of theirs has ended by an exception.
    """
    s, missing, x = facts.snapshot, opened.missing, late[0]
    died = ended_thread(s.ranks[q] for q in missing)
    if opened.alone or not {*missing} <= {*x.victims} or (len(missing) >= len(late) and not died):
        return None
    ranks, first = sorted(y.state.rank for y in late), s.ranks[missing[0]]
    assert first.blocked is not None
    return wording.NEVER_JOINED(
        culprits=missing, victims=ranks, collective=opened.call, severity=_severity(late),
        where=(w for q in missing for w in where_stack(s.ranks[q], s.ranks[q].user_stack, "waiting")),
        waiting=(w for y in late for w in where_stack(y.state, y.state.user_stack, y.state.activity)),
        step=x.state.step, first_seen_s=s.t_s - x.waited_s, opened=opened.call, at_opened=opened.call.site, died=died,
        each=rank_list(ranks) if len(ranks) == 1 else f"each of {rank_list(ranks)}", does=f"{does}{at(x.state.current_site)}",
        call=first.blocked, at_call=first.blocked.site, implicit=implicit_text(first, first.blocked), waited_s=x.waited_s,
        do=filled(wording.DO_DIED if died else wording.DO_ABSENT, ranks=missing, call=opened.call),
    )  # fmt: skip


def _open_text(opened: Open | None) -> str:
    """Return `, with all_reduce #3 (save) at t.py:4 in save in flight, which rank 0 has not entered`; empty without one."""
    return filled(wording.OPEN, call=opened.call, site=opened.call.site, ranks=opened.missing) if opened else ""


def _open_advice(r: RankState, opened: Open) -> str:
    guard, why = opened.alone, "find what started it, maybe a thread"
    if guard is not None:
        why = f"only rank {r.rank} is under `{guard.text}`{at(guard.site)}"
    return filled(wording.DO_OPEN, call=opened.call, ranks=opened.missing, why=why)


def locked(workers: Iterable[Site | None], source: Source) -> bool:
    """True if a worker of a data loader is at a line that takes a lock, and not a file's."""
    lines = (line_at(site, source) for site in workers)
    return any(by_line(line, idle=True) == "lock" and not _FILE_LOCK.search(line) for line in lines)


def _of_loader(facts: Facts, r: RankState, workers: Sequence[Where]) -> str:
    """Return the row of `wording.DO` for a rank that waits for its data loader."""
    if locked(r.workers, facts.source):
        return "worker's lock"
    own = [x.workers for x in r.loaders if x.in_training or x.site in r.user_stack]
    return "workers" if workers else "loads itself" if own and not any(own) else "data"


def _dead_child(r: RankState) -> str:
    """Return `; a process that it started was killed by SIGKILL`; empty without one."""
    if r.dead_child is None:
        return ""
    code, number = r.dead_child
    return f"; a process that it started {f'was killed by {signal_name(number)}' if number else f'ended with exit code {code}'}"


def _severity(late: Sequence[_Late]) -> Severity | None:
    return Severity.ERROR if any(x.waited_s > limits.factor * x.limit_s for x in late) else None


def _unset(facts: Facts, waited_s: float) -> Severity | None:
    """Return an error if every main thread waits for a key of a store, or for those that do: another thread might set it."""
    s = facts.snapshot
    nobody = waited_s >= limits.patience_s["user_code"] and nobody_sets([*s.ranks.values()], facts.graph, s.world_size)
    return Severity.ERROR if nobody else None


def _finding(facts: Facts, late: list[_Late]) -> Finding:
    """Return the finding of ranks at one line, the one that others have waited for longest first."""
    s, first = facts.snapshot, late[0]
    r, victim = first.state, s.ranks[first.victims[0]]
    call = victim.blocked
    assert call is not None
    doing = refined(_doing(r), line_at(r.current_site, facts.source))
    states = sorted((x.state for x in late), key=lambda state: state.rank)
    ranks = [state.rank for state in states]
    workers = workers_of(s.ranks, ranks) if doing == "data" else ()
    threads = doing in ("lock", "queue", "worker")
    gone = _dead_child(r) if threads or doing in ("socket", "process", "data") else ""
    died = ended_thread([r]) if threads and not gone else ""
    opened = left_open(facts, r) if threads else None
    if opened and (found := _never_joined(facts, late, opened, wording.DOES[doing])):
        return found
    do = _of_loader(facts, r, workers) if doing == "data" else doing
    polled = polled_loop(r.current_site, facts.source) if doing in ("sleep", "user_code") else None
    doing = "sleep" if polled is not None and polled[2] else doing  # between two naps it tests
    otherwise = wording.DO_IMPORT if doing == "worker" and _import(facts, r) else _advice(facts, states, victim, do)
    thread = filled(wording.DO_DIED, ranks=ranks) if died else otherwise
    advice = _open_advice(r, opened) if opened else wording.DO_GONE if gone else thread
    victims = sorted({v for x in late for v in x.victims})
    key, for_file = doing == "store_key", polled is not None and "exists" in polled[0]
    others = [state for q, state in s.ranks.items() if q not in ranks]
    if keys_differ(states, others, s.world_size):
        advice = wording.DO_KEYS
    elif key or (polled is not None and polled[2] and not opened):
        why = hidden_error(r.user_stack, facts.source)
        if why is None and (key or for_file):
            why = left_unwritten(r.user_stack, facts.source, key)
        if why is not None and len(victims) == 1 and len(victims) + len(ranks) == len(s.ranks):
            return _polled_for(facts, victims[0], ranks, polled, why, first)
        if polled is not None:
            advice = _of_loop(polled[0])
            advice += f", at `{why[0]}`{at(why[1])}" if why is not None else ""
    # of a message each rank makes another half: which it has left out is not known
    left = [] if call.p2p else paths.left_loop(r.user_stack, victim.user_stack, facts.source)
    advice = (decision_advice(left[0], ranks, call) if len(left) == 1 else wording.DO_LEFT) if left else advice
    fed, does = _of_queue(facts, r, victims) if doing in ("socket", "queue", "lock") and not died else ("", "")
    advice, does = fed or advice, does or keys_text(states, others)
    at_line = r.current_site is not None and not left and not does  # the line is what a person looks for
    return (wording.AT_LINE if at_line else wording.STALL)(
        cause=_CAUSE.get(doing, "user_code" if r.current_site else "unknown"),
        severity=_unset(facts, first.waited_s) or _severity(late), culprits=ranks, victims=victims,
        collective=call if call.op else None, where=(*(w for state in states for w in where_stack(state, state.user_stack, state.activity)), *workers),
        waiting=wheres(s, victims), step=r.step, first_seen_s=s.t_s - first.waited_s,
        left=f"{left_text(ranks, call)}: {conditions_text(left)}; " if left else "", missing=_missing_text(ranks, call, victim.rank, at_line),
        size=f", {size_text(call.bytes)}" if call.bytes else "", implicit=implicit_text(victim, call),
        does=does or f"{_subject(ranks, at_line)} {wording.DOES.get(doing, 'is busy')}{at(r.current_site)}",
        loop=f", in the loop `{polled[0]}`{at(polled[1])}" if polled is not None else _import(facts, r),
        worker=worker_text(r) if doing == "data" else "",
        open=_open_text(opened),
        died=died, gone=gone,
        handling=f", while it handles {pending_exception.handled(r)}" if r.handling else "",
        waited_s=first.waited_s,
        usual=f" (its longest so far: {rough_duration(r.longest_delay_s)})" if r.longest_delay_s > 0.5 else "",
        cost=_cost(s.world_size, victims, ranks, sure=bool(key or for_file or does), waits=doing in ("socket", "queue")),
        do=advice,
    )  # fmt: skip


def _advice(facts: Facts, late: Sequence[RankState], victim: RankState, row: str) -> str:
    """Return a row of `wording.DO`, after the condition on the rank that keeps this work to the late ranks."""
    ranks, stacks = [r.rank for r in late], (late[0].user_stack, victim.user_stack)
    return (kept_text(*stacks, ranks, facts.source) if row in _DUTIES else "") + wording.DO.get(row, wording.DO[""])


def _import(facts: Facts, r: RankState) -> str:
    """Return `, while train.py:48 imports views.py`, of the innermost import that a rank is in; empty if it is in none."""
    for inner, outer in itertools.pairwise(r.user_stack):
        if inner.function == "<module>" and "import" in line_at(outer, facts.source):
            return f", while {line_text(outer.file, outer.line, base=True)} imports {inner.file.rpartition('/')[2]}"
    return ""


def _cost(world: int, victims: Sequence[int], ranks: Sequence[int], sure: bool, waits: bool) -> str:
    """Return what a stall costs.

    Args:
        sure: No other process than a rank can end it.
        waits: The late ranks wait, too: for another process, another host, or a rank.
    """
    if len(victims) + len(ranks) < world or not (sure or waits):
        return filled(wording.WAIT_OF, victims=victims, world=world)
    return NO_PROGRESS if sure else "every rank waits"


def _of_queue(facts: Facts, r: RankState, victims: Sequence[int]) -> tuple[str, str]:
    """Return (advice, what a rank does) if the ranks that wait for it fill the queue that it waits for; empty if not."""
    fed = filled_by(r, (facts.snapshot.ranks[v] for v in victims), facts.source)
    if fed is None:
        return _end_text(r, facts.source), ""
    skip = f": `{fed.condition}`{at(fed.condition_at)} leads past it" if fed.condition else ""
    do = filled(wording.DO_FED, name=fed.name, fillers=fed.ranks, put=fed.put, ranks=[r.rank], skip=skip)
    return do, filled(wording.FED, name=fed.name, fillers=fed.ranks, put=fed.put, site=r.current_site)


def _of_loop(loop: str) -> str:
    """Return what to do about a loop that polls: for a file to be made, for one to vanish, or for anything else."""
    row = wording.DO_POLL if "exists" not in loop else wording.DO_POLL_FILE if "not " in loop else wording.DO_POLL_GONE
    return filled(row, loop=loop)


def _end_text(r: RankState, source: Source) -> str:
    """Return what to do about a queue that another thread or process fills, or empties; empty if it is not known where."""
    if (end := other_end(r, source)) is None:
        return ""
    handler = (
        f": `{end.quiet.text}`{at(end.quiet.place)} catches what ends it, so let it pass that on" if end.quiet else ""
    )
    does = "fills" if end.fills else "empties"
    return f"see whether what {does} that queue{at(end.site)} still runs{handler}; wait in the queue with a time limit"


def _polled_for(
    facts: Facts,
    writer: int,
    ranks: list[int],
    polled: tuple[str, Site, bool] | None,
    why: tuple[str, Site],
    first: _Late,
) -> Finding:
    """Return the finding of the only rank that does not poll, or wait for a key, for what it may have left out."""
    s = facts.snapshot
    state, site = s.ranks[writer], first.state.current_site
    call = state.blocked
    assert call is not None
    text, at_text = polled[:2] if polled is not None else (line_at(site, facts.source), site)
    return (wording.KEY_UNSET if polled is None else wording.POLLED)(
        severity=_unset(facts, first.waited_s), culprits=(writer,), victims=ranks, collective=call if call.op else None,
        where=(where(state, None, why[1]), *where_stack(state, state.user_stack, "waiting")),
        waiting=(w for q in ranks for w in where_stack(s.ranks[q], s.ranks[q].user_stack, s.ranks[q].activity)),
        step=state.step, first_seen_s=s.t_s - first.waited_s, text=text, at_text=at_text, why=why[0], at_why=why[1],
        call=call, at_call=call.site, implicit=implicit_text(state, call), waited_s=first.waited_s, world=s.world_size,
    )  # fmt: skip


def _subject(ranks: Sequence[int], named: bool) -> str:
    """Return `rank 1` or `each of ranks 1, 2`; `it` or `each` if they are not to be named."""
    who = "" if len(ranks) == 1 else "each of " if named else "each"
    return who + rank_list(ranks) if named else who or "it"


def _missing_text(ranks: list[int], call: Call, victim: int, known: bool) -> str:
    """Return what a victim in `call` waits for: the call of these ranks (`it`, if `known`), or the other end of a message."""
    who = rank_list(ranks) if not known else "it" if len(ranks) == 1 else "they"
    if not call.p2p:
        return f"{who} {verb(ranks, 'has', 'have')} not entered {op_text(call)}"
    if ranks != [call.peer]:
        return f"{who} {verb(ranks, 'keeps', 'keep')} rank {victim} waiting in {op_text(call)}"
    done = "sent" if "recv" in call.op else "received"
    return f"{who} has not {done} what rank {victim} waits for in {op_text(call)}"
