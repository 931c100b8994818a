"""Judges where ranks are: by the rules of a snapshot, as far as places alone go.

Stacks show no sequence numbers. So every rank is taken to be in one and the same collective of its group, the
newest: ranks in different operations, or some in one and one elsewhere, are *suspected*; nothing is proved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from distdiag.diagnosis import kinds
from distdiag.diagnosis.culprit import paths, stacks
from distdiag.diagnosis.culprit.verdict import judge as judge_graph
from distdiag.diagnosis.model.findings import Finding, Report, Severity, State, rank_list
from distdiag.diagnosis.model.snapshot import Call, Group, Life, Model, RankState, Site, Snapshot
from distdiag.diagnosis.model.syntax import Source, line_at, no_source
from distdiag.diagnosis.rules.stall import locked
from distdiag.diagnosis.text.conditions import diverge_text
from distdiag.diagnosis.text.finding import without_monitor
from distdiag.diagnosis.text.incident import implicit_text, verb
from distdiag.diagnosis.text.incident_finding import incident_finding
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at, op_text, where_stack, wheres, worker_text, workers_of
from distdiag.diagnosis.text.stall import DO
from distdiag.diagnosis.text.template import Template, filled
from distdiag.diagnosis.waits.graph import WaitGraph, build
from distdiag.sources.logs.meanings import LOG_ON_ALL
from distdiag.sources.stacks.calls import DEFAULT_GROUP, UNKNOWN_GROUP, Feeder, Position
from distdiag.terms.activity import ACTIVITIES
from distdiag.terms.ranks import by_value
from distdiag.terms.untrusted import visible

SETTLED_S = 60.0  # the snapshot counts as stable: what has not moved between two samples
SHOWN = 4  # places in one message
_ASSUMED = re.compile(rf" \({DEFAULT_GROUP}\)|(?<=\(){DEFAULT_GROUP}[,;] ")  # no stack names it
_DOES = {a.word: a.does for a in ACTIVITIES if a.does}
_DO = {a.word: without_monitor(a.do) for a in ACTIVITIES if a.do}
_DO_FEED = "see what {what} waits for{site}: give its I/O a timeout, and let it put its error into the queue"
_DO_LOADER = "see the workers of that loader (`py-spy dump --pid PID --subprocesses`: dead, stuck on storage, forked with a lock?); num_workers=0, or timeout= of the DataLoader, shows their error"
_LOOK_FOR = "look for what they wait for at these lines: a lock, a key of a store, a file, another process"
_AGAIN = "take the stacks again after some seconds: if none has moved, "
_LOOK = "check that line; if it is only slow, the others continue when it is done"
_stall = partial(Template, kinds.STALL)
STALL = _stall(
    "user_code", "{missing}{implicit}; {does}{moves}{worker}{reason}; {victims} {victims:waits|wait}", "", "{do}"
)
APART = _stall("unknown", "{odd} {are} in {own}{own_site} where {rest} {wait} in {other}{other_site}{still}{reason}",
               NO_PROGRESS, "compare the paths of the ranks to both lines: each must make as many of these calls as the others",
               severity=Severity.WARNING)  # fmt: skip
TOGETHER = _stall("unknown", "{victims} are all in {what}{at}{still}: what they pass to it differs (size, group, how "
                  "often they came there), or the network does not deliver", NO_PROGRESS,
                  "record the next run (`DISTDIAG=1`): counts of calls decide", severity=Severity.WARNING)  # fmt: skip
SAME_LINE = _stall("unknown", "{victims} are all in {what}{at}: a running job, or one whose calls do not fit together", "",
                   _AGAIN + "compare what the ranks pass to it",
                   severity=Severity.INFO)  # fmt: skip
GROUPS = _stall("unknown", "the ranks create different groups in new_group(){at}{still}: {texts}", NO_PROGRESS,
                "let every rank call new_group with the same ranks, in the same order; agree on them first (broadcast the list)",
                severity=Severity.WARNING)  # fmt: skip
NOBODY = _stall("unknown", "no rank is in a collective{still}: {places}", NO_PROGRESS, "{do}",
                severity=Severity.WARNING)  # fmt: skip
ODD_ONE = _stall("unknown", "no stack shows a collective: {rest} are all at {line}, and {culprits} {does}{at}; on a device, the others "
                 "may wait at that line for what {culprits} {culprits:has|have} not launched", "",
                 _AGAIN + "{do}", severity=Severity.INFO)  # fmt: skip
DEVICES = _stall("unknown", "every rank waits for its device{still}{places}", "",
                 "attach again: if none has moved by then, it is a kernel or a collective that does not end; with "
                 "TORCH_NCCL_DEBUG_INFO_PIPE_FILE set, or recorded by distdiag, counts of calls decide",
                 severity=Severity.INFO)  # fmt: skip
SILENT = Template(kinds.RANK_LOST, "silent", "{culprits} {culprits:has|have} no process on this host; {victims} {victims:waits|wait} "
                  "in {what}{at}", "the job cannot continue without it",
                  "see the log of {culprits} for how {culprits:it|they} ended")  # fmt: skip


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One rank.

    Attributes:
        position: Where it is; None if that could not be read.
        moved: It was elsewhere, or had other local variables, in an earlier sample.
        once: There was no earlier sample: whether it moves is not known.
        busy: It used its CPU between the samples, or computes; False where not known.
        open: Why it may yet move although it has not: `waited for a CPU for 4.1 of 6.0 s`; else empty.
        feeder: The thread that may fill the queue in which it waits.
        workers: Where the workers of its data loader are, if it waits for them; None: in no line of the user's.
        life: RUNNING, STOPPED, or MISSING for a rank without a process where all should be.
    """

    position: Position | None = None
    pid: int | None = None
    moved: bool = False
    once: bool = False
    busy: bool = False
    open: str = ""
    feeder: Feeder | None = None
    workers: tuple[Site | None, ...] = ()
    life: Life = Life.RUNNING

    @property
    def goes_on(self) -> bool:
        """True if it has not been shown to stand still: nobody is blamed by where it was."""
        return self.moved or bool(self.open)

    @property
    def waits_for_device(self) -> bool:
        """True if its host has not moved and waits for its device, as hosts do while a collective runs there."""
        return not self.goes_on and self.position is not None and self.position.device


def snapshot_of(seen: Mapping[int, Seen]) -> Snapshot:
    """Return the snapshot: ranks that have not moved wait in the operation that their stack shows."""
    ranks, names = {}, {DEFAULT_GROUP}
    # whom a group of the user has is not known: a rank in it may wait for the very one that goes on
    others_known = not any(s.goes_on for s in seen.values())
    for rank, s in seen.items():
        at_ = s.position
        call = at_.call if at_ is not None and not s.goes_on else None
        if call is not None and not (others_known or call.p2p or call.group == DEFAULT_GROUP):
            call = replace(call, group=UNKNOWN_GROUP)
        state = RankState(rank=rank, life=s.life, pid=s.pid)
        if at_ is not None:
            state = replace(
                state, blocked=call, current_site=at_.site, user_stack=at_.stack, names=at_.names, host_blocked=not s.busy,
                activity=at_.activity if call is not None or at_.call is None else "user_code",
                models=(Model(),) if at_.phase else (), phase=at_.phase or "", workers=s.workers,
            )  # fmt: skip
        if call is not None:
            names |= {call.group} - {UNKNOWN_GROUP}
            if call.p2p:
                way = "send" if call.op.endswith("send") else "recv"
                state = replace(state, p2p_issued={f"{way}:{call.peer}:{call.tag}:{call.group}": 1})
        ranks[rank] = state
    groups = {n: Group(name=n, ranks=tuple(sorted(seen)), backend="gloo" if n == DEFAULT_GROUP else "") for n in names}
    world = max(seen, default=-1) + 1
    return Snapshot(t_s=SETTLED_S, world_size=world, ranks=ranks, groups=groups, source="stacks", stable_since_s=0.0)


def findings(seen: Mapping[int, Seen], source: Source = no_source) -> list[Finding]:
    """Return what is suspected; nothing if every rank moves, or only waits for one that does."""
    s = snapshot_of(seen)
    graph = build(s)
    found = [incident_finding(s, verdict) for verdict in judge_graph(s, graph, source=source)]
    if not found:
        found = list(_silent(s, graph)) or list(_stalls(s, graph, seen, source))
    logs = {q: x.position.site for q, x in seen.items() if x.position is not None and x.position.logs}
    found = [_of_log(f, logs) for f in found or [_no_sink(s, seen, source)] if f is not None]
    return [replace(f, message=_ASSUMED.sub("", f.message), advice=_ASSUMED.sub("", f.advice)) for f in found]


def _of_log(f: Finding, logs: Mapping[int, Site | None]) -> Finding:
    """Return a finding with what to do where only some of its ranks log a value of all ranks."""
    ranks = {*f.culprits, *f.victims}
    if logs.keys().isdisjoint(ranks) or logs.keys() >= ranks:
        return f
    return replace(f, advice=f"{LOG_ON_ALL}{at(min(logs.items())[1])}; else {f.advice}")


def report(
    seen: Mapping[int, Seen], source: Source, *, run: str, world: int | None, notes: Sequence[str] = (),
    unjudged: str | None = None, **more: Any,
) -> Report:  # fmt: skip
    """Return the verdict as `distdiag diagnose` prints it."""
    found = findings(seen, source)
    alone = "" if found else _alone(seen)
    stuck = any(f.severity != Severity.INFO for f in found)
    lost = any(f.kind == kinds.RANK_LOST.name for f in found)
    unknown = alone or (found and any(x.once for x in seen.values()))
    state = State.DEGRADED if lost else State.STALLED if stuck else State.WAITING if unknown else State.RUNNING
    there = sum(s.life != Life.MISSING for s in seen.values())
    return Report(
        run=run, state=state, world_size=world, ranks_seen=there, findings=tuple(found), notes=tuple(notes),
        unjudged="; ".join(filter(None, (alone, unjudged))) or None, **more,
    )  # fmt: skip


def _alone(seen: Mapping[int, Seen]) -> str:
    """Return where the only rank with a stack waits for others, of which nothing is known; else empty."""
    there = [(rank, s.position) for rank, s in seen.items() if s.position is not None and not s.goes_on]
    if len(there) != 1 or (where := there[0][1]).call is None:
        return ""
    return f"rank {there[0][0]} waits in {_op(where.call)}{at(where.site)}, and the stacks of the ranks that it waits for are missing"


def _silent(s: Snapshot, graph: WaitGraph) -> Iterator[Finding]:
    gone = sorted(q for q in graph.sinks if s.ranks[q].life == Life.MISSING)
    victims = sorted(graph.victims_of(gone)) if gone else []
    if victims:
        call = _call(s, victims[0])
        yield SILENT(
            culprits=gone, victims=victims, collective=_unnumbered(call), where=wheres(s, gone), waiting=wheres(s, victims),
            what=_op(call), at=call.site,
        )  # fmt: skip


def _stalls(s: Snapshot, graph: WaitGraph, seen: Mapping[int, Seen], source: Source) -> Iterator[Finding]:
    """Yield the ranks that others wait for and that are in no collective, by their line."""
    absent = {q for w in graph.waits for q in w.missing} - graph.gone - graph.unknown - graph.of_rank.keys()
    late = {q: s.ranks[q].current_site for q in graph.sinks or sorted(absent) if seen[q].position is not None}
    on_device = {q for q in late if seen[q].waits_for_device}
    if len(on_device) < len(late):  # such a device may wait for what the others have not launched
        late = {q: site for q, site in late.items() if q not in on_device}
    for ranks in by_value(late).values():
        victims = sorted(graph.victims_of(ranks))
        if not victims:
            continue
        if on_device.issuperset(ranks) and len(ranks) > len(victims):
            yield _apart(s, victims, ranks, known=True)
            continue
        first, call, moved = s.ranks[ranks[0]], _call(s, victims[0]), any(seen[q].goes_on for q in ranks)
        works = first.activity == "user_code" and any(seen[q].once for q in ranks)  # one sample is no sign of a stall
        if len({_call(s, q).op for q in victims}) > 1:  # then they are in several groups
            call = replace(call, group=UNKNOWN_GROUP)
        condition = _on_rank(first.user_stack, s.ranks[victims[0]].user_stack, source)
        word = first.activity
        held, feeds = word == "data" and locked(first.workers, source), _feeds(seen[ranks[0]].feeder)
        op = op_text(_unnumbered(call))
        inside = {p.inside for q in ranks if (p := seen[q].position) is not None}
        inner = at(inside.pop()) if len(inside) == 1 else ""
        missing = f"{rank_list(ranks)} {verb(ranks, 'has', 'have')} not entered {op}{at(call.site)}"
        if call.p2p:
            keeps = f"{rank_list(ranks)} {verb(ranks, 'keeps', 'keep')} rank {victims[0]}"
            missing = f"{keeps} waiting in {op}{at(call.site)}"
        waiting = sorted({*victims, *on_device - late.keys()})
        yield STALL(
            cause=word if word in ("data", "checkpoint") else "user_code", severity=Severity.INFO if moved or works else Severity.WARNING,
            culprits=ranks, victims=waiting, collective=_unnumbered(call) if call.op else None,
            where=(*(w for q in ranks for w in where_stack(s.ranks[q], s.ranks[q].user_stack)), *workers_of(s.ranks, ranks)),
            waiting=wheres(s, waiting), worker=worker_text(first, _DOES["lock"] if held else "is") + feeds[0],
            missing=missing, implicit=implicit_text(s.ranks[victims[0]], call),
            does=f"{verb(ranks, 'it', 'each')} {_DOES.get(word, 'is busy')}{at(first.current_site)}" + f" (innermost frame{inner})" * bool(inner),
            moves=" and moves" if moved and not any(seen[q].open for q in ranks) else "", reason=condition, do=_AGAIN * works + (feeds[1] or _do(first, source)),
        )  # fmt: skip


def _do(r: RankState, source: Source) -> str:
    """Return what to do about the work of a late rank, or of its data loader's worker, of which the line may not be known."""
    worker = next((w for w in r.workers if w is not None), None) if r.activity == "data" else None
    if worker is None:
        return _DO.get(r.activity) or _LOOK
    if locked(r.workers, source):
        return DO["worker's lock"]
    return DO["workers"] + ("" if line_at(worker, source) else "; if it takes a lock: " + DO["worker's lock"])


def _feeds(other: Feeder | None) -> tuple[str, str]:
    """Return where the thread is that should fill the queue, and what to do; empty texts if none is known."""
    if other is None or other.site is None:
        return "", ""
    what = f"its thread {visible(other.name)}" if other.name else "another of its threads"
    does = "is" if other.activity == "user_code" else _DOES.get(other.activity, "is")
    do = _DO_LOADER if other.activity == "data" else filled(_DO_FEED, what=what.removeprefix("its "), site=other.site)
    return f", and {what} {does}{at(other.site)}", do


def _no_sink(s: Snapshot, seen: Mapping[int, Seen], source: Source) -> Finding | None:
    """Return the finding on ranks of which none moves and none waits for another: at one line, or several."""
    if (odd := _odd_one(s, seen)) is not None:
        return odd
    if any(x.goes_on or x.busy or x.position is None for x in seen.values()) or len(seen) < 2:
        return None
    calls = {q: r.blocked for q, r in s.ranks.items() if r.blocked is not None}
    once = any(x.once for x in seen.values())
    still = "" if once else ", and none has moved"
    if not calls and any(r.activity in ("sleep", "user_code") for r in s.ranks.values()):
        return None  # that ends by itself, or is no different from work
    if not calls:
        places = by_value({q: r.current_site for q, r in s.ranks.items()})
        if all(x.waits_for_device for x in seen.values()):  # as in a step with a long kernel
            texts = ", ".join(f"{rank_list(ranks)}{at(site)}" for site, ranks in list(places.items())[:SHOWN])
            return DEVICES(victims=sorted(seen), where=wheres(s, sorted(seen)), places=f": {texts}", still=still)
        does = {site: _DOES.get(s.ranks[ranks[0]].activity, "is busy") for site, ranks in places.items()}
        shown = list(places.items())[:SHOWN]
        texts = [f"{rank_list(q)}: {verb(q, 'it', 'each')} {does[site]}{at(site)}" for site, q in shown]
        words = {r.activity for r in s.ranks.values()}
        do = (_DO.get(min(words)) if len(words) == 1 else None) or _LOOK_FOR
        locked = words == {"lock_file"} and len(places) == 1  # who holds it is at another place
        left = "; none of these ranks is seen to hold it: another process may, or one that was killed left it" * locked
        return NOBODY(
            severity=Severity.INFO if once and not locked else Severity.WARNING, victims=sorted(seen),
            where=wheres(s, sorted(seen)), places="; ".join(texts) + left, do=do, still=still,
        )  # fmt: skip
    sides = _sides({q: c.site for q, c in calls.items()})
    created = _sides({q: x.position.creates for q, x in seen.items() if q in calls and x.position is not None})
    if len(sides) == 1 and len(created) > 1:
        return _groups(s, seen, created, still)
    if len(sides) == 1:
        call = calls[sides[0][0]]
        return (SAME_LINE if once else TOGETHER)(
            victims=sorted(calls), collective=_unnumbered(call), waiting=wheres(s, sorted(calls)), what=_op(call), at=call.site,
            still=still,
        )  # fmt: skip
    odd, rest = [q for side in sides[1:] for q in side], sides[0]
    known = len(odd) < len(rest)
    if len(sides) == 2 and not known:
        found = stacks.between(s.ranks, odd, rest, source)
        # the side that a condition on the rank leads away
        led = paths.led_away(s.ranks[odd[0]].user_stack, s.ranks[rest[0]].user_stack, source)
        accused = list(found.ranks) if found is not None else (odd, rest)[led[1]] if led is not None else []
        known, odd, rest = bool(accused), accused or odd, [q for q in calls if q not in accused] if accused else rest
    return _apart(s, odd, rest, known, still, source)


def _apart(
    s: Snapshot, odd: Sequence[int], rest: Sequence[int], known: bool, still: str = "", source: Source = no_source,
) -> Finding:  # fmt: skip
    """Return that the `odd` ranks, the culprits if that is known, are in another call than the rest, or the rest only waits for devices."""
    stacks = s.ranks[odd[0]].user_stack, s.ranks[rest[0]].user_stack
    own, theirs, everybody = _call(s, odd[0]), s.ranks[rest[0]].blocked, sorted({*odd, *rest})
    return APART(
        culprits=odd if known else (), victims=rest if known else everybody, collective=None if theirs is None else _unnumbered(theirs),
        where=wheres(s, odd if known else everybody), waiting=wheres(s, rest if known else ()),
        odd=rank_list(odd), are=verb(odd, "is", "are"), rest=rank_list(rest), wait=verb(rest, "waits", "wait"),
        own=_op(own), own_site=own.site, other="a device synchronization" if theirs is None else _op(theirs),
        other_site=s.ranks[rest[0]].current_site if theirs is None else theirs.site,
        reason=_on_rank(*stacks, source) or diverge_text(paths.conditions_between(*stacks, source)), still=still,
    )  # fmt: skip


def _odd_one(s: Snapshot, seen: Mapping[int, Seen]) -> Finding | None:
    """Return that one rank waits for something else while all others are at one line of the user's, in a single sample.

    Hosts that wait for their device show no collective: they are at a line as `loss.item()`.
    """
    sides = _sides({q: r.current_site for q, r in s.ranks.items()})
    alone = len(sides) == 2 and len(sides[1]) == 1 and len(sides[0]) > 2
    if not alone or not all(x.once and x.position for x in seen.values()):
        return None
    rest, (odd,) = sides
    word, line = s.ranks[odd].activity, s.ranks[rest[0]].current_site
    if word in ("user_code", "sleep", "device") or word not in _DOES or line is None:
        return None
    if any(r.blocked is not None for r in s.ranks.values()) or {s.ranks[q].activity for q in rest} != {"user_code"}:
        return None
    return ODD_ONE(
        culprits=(odd,), victims=rest, where=wheres(s, (odd,)), waiting=wheres(s, rest), rest=rank_list(rest),
        line=at(line).removeprefix(" at "), does=_DOES[word], at=s.ranks[odd].current_site, do=_DO.get(word) or _LOOK,
    )  # fmt: skip


def _sides(values: Mapping[int, Any]) -> list[list[int]]:
    """Return the ranks with equal values, the largest side first."""
    return sorted(by_value(values).values(), key=lambda side: (-len(side), side[0]))


def _groups(s: Snapshot, seen: Mapping[int, Seen], sides: Sequence[Sequence[int]], still: str) -> Finding:
    """Return that ranks wait for each other in one call of new_group for different groups."""
    known = len(sides[0]) > len(sides[1])
    odd = sorted(q for side in sides[1:] for q in side)
    texts = [f"{rank_list(x)}: {p.creates}" for x in sides[:SHOWN] if (p := seen[x[0]].position) is not None]
    return GROUPS(
        culprits=odd if known else (), victims=sides[0] if known else sorted(seen), where=wheres(s, odd if known else sorted(seen)),
        waiting=wheres(s, sides[0] if known else ()), at=_call(s, odd[0]).site, texts="; ".join(texts), still=still,
    )  # fmt: skip


def _on_rank(mine: Sequence[Site], theirs: Sequence[Site], source: Source) -> str:
    """Return `; due to `if rank == 0` at a.py:3`: the condition that leads one rank elsewhere; often empty."""
    found = paths.rank_condition(mine, theirs, source) or paths.rank_condition(theirs, mine, source)
    return f"; due to `{found.text}`{at(found.site)}" if found is not None else ""


def _call(s: Snapshot, rank: int) -> Call:
    call = s.ranks[rank].blocked
    assert call is not None
    return call


def _unnumbered(call: Call) -> Call:
    return replace(call, seq=None, group="" if call.group == DEFAULT_GROUP else call.group)


def _op(call: Call) -> str:
    return op_text(_unnumbered(call))
