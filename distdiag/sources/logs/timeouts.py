"""Collectives that timed out, by the watchdogs' lines of all ranks: which rank the others waited for, as far as they show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from distdiag.diagnosis.model.findings import Certainty, CollectiveRef, Finding, Severity, Where, rank_list
from distdiag.diagnosis.model.snapshot import Site
from distdiag.diagnosis.text.incident import verb
from distdiag.diagnosis.text.phrases import NO_PROGRESS_MADE, at, rough_time, where_at
from distdiag.sources.logs.collect import Collected, Event, evidence
from distdiag.terms import operations
from distdiag.terms.untrusted import MAX_INT

NOT_RECORDED = {"18446744073709551615", "-1"}  # the size of coalesced operations
LATE_FACTOR, LATE_S = 2.0, 60.0  # a running watchdog checks ten times a second
SAME_SIZES = [operation.name for operation in operations.OPERATIONS if operation.same_size == "all"]

Group = tuple[str, str]  # number and description; ("", "") if the lines do not name it


@dataclass(slots=True)
class Waiting:
    """One rank in one group: the first operation that timed out there, and how far it was.

    Attributes:
        seq, op, size: Fields of the operation; None if only the counters were written.
        issued, completed: The newest operation, by the rank's own counters.
    """

    rank: int
    seq: int | None = None
    op: str = ""
    size: int | None = None
    limit_s: float | None = None
    ran_s: float | None = None
    issued: int | None = None
    completed: int | None = None
    signalled: bool = False  # it only followed another rank's timeout
    site: Site | None = None
    events: list[Event] = field(default_factory=list)


def op_name(name: str) -> str:
    """Return torch.distributed's name of `ALLREDUCE`, `_ALLGATHER_BASE`."""
    return operations.op_name(name.lower())


def groups_of(events: Iterable[Event]) -> dict[Group, dict[int, Waiting]]:
    """Return the ranks that a watchdog reported, by group.

    The line of the timeout does not name its group in most versions; the line with the counters does, and both have the
    operation's number.
    """
    named: dict[tuple[int, int], Group] = {}
    ours = [e for e in events if e.name in ("timeout", "counters", "dump_signal") and e.rank is not None]
    for e in ours:
        if e.name == "counters" and e.who.group is not None:
            named.setdefault((_rank(e), _int(e, "at") or 0), e.who.group)
    with_number: dict[int, set[Group]] = {}
    for (_, number), group in named.items():
        with_number.setdefault(number, set()).add(group)
    alone = {number: next(iter(groups)) for number, groups in with_number.items() if len(groups) == 1}
    out: dict[Group, dict[int, Waiting]] = {}
    for e in ours:
        rank, seq = _rank(e), _int(e, "seq") if e.name == "timeout" else _int(e, "at")
        group = e.who.group or named.get((rank, seq or 0)) or alone.get(seq or 0, ("", ""))
        w = out.setdefault(group, {}).setdefault(rank, Waiting(rank))
        w.events.append(e)
        if e.name == "timeout":
            _note_timeout(w, e, seq)
        else:
            w.issued, w.completed = _int(e, "enq"), _int(e, "done")
            if e.name == "counters":
                w.seq = seq if w.seq is None else w.seq
            else:
                w.signalled = "first" in e.fields
    return out


def _note_timeout(w: Waiting, e: Event, seq: int | None) -> None:
    if w.op and w.seq is not None and seq is not None and seq >= w.seq:
        return  # the first one matters: later ones were queued behind it
    size = e.fields.get("nin")
    w.seq, w.op = seq, op_name(e.fields["op"])
    w.size = int(size) if size is not None and size not in NOT_RECORDED and len(size) < 18 else None
    w.limit_s, w.ran_s = (_int(e, "limit") or 0) / 1e3, (_int(e, "ran") or 0) / 1e3
    w.site = e.site or w.site


def _rank(e: Event) -> int:
    assert e.rank is not None
    return e.rank


def _int(e: Event, key: str) -> int | None:
    text = e.fields.get(key, "")
    return int(text) if text.lstrip("-").isdecimal() and len(text) <= 18 and abs(int(text)) < MAX_INT else None


def label(group: Group) -> str:
    """Return how a group is called in a message: its description, else its number; empty if unknown."""
    number, description = group
    return description if description and description != "undefined" else f"group {number}" if number else ""


def findings(found: Collected) -> list[Finding]:
    """Return one finding on each group whose collective timed out; only the first if groups share the ranks."""
    by_group = groups_of(found.events)
    out = [f for g, waits in by_group.items() if (f := _finding(found, g, waits)) is not None]
    if not out:
        signalled = {w.rank for waits in by_group.values() for w in waits.values()}
        return [_elsewhere(found, signalled, by_group)] if signalled else []
    out.sort(key=lambda f: (not f.culprits, -len(f.victims)))
    return out[:3]


def _finding(found: Collected, group: Group, waits: dict[int, Waiting]) -> Finding | None:
    waiting = {r: w for r, w in waits.items() if w.op or w.seq is not None or (w.issued or 0) > (w.completed or 0) >= 0}
    for w in waiting.values():
        if w.seq is None and w.completed is not None:
            w.seq = w.completed + 1
    if not waiting:
        return None
    seq, count = Counter(w.seq for w in waiting.values()).most_common(1)[0]
    together = {r: w for r, w in waiting.items() if w.seq == seq}
    if len(together) < len(waiting):
        return _apart(found, group, waiting, seq if count > len(waiting) / 2 else None)
    if (f := _different(found, group, together)) is not None:
        return f
    late = tuple(
        sorted(
            r
            for r, w in waits.items()
            if r not in waiting and w.issued is not None and seq is not None and w.issued < seq
        )
    )
    absent = () if late else _absent(found, group, together)
    return _late(found, group, together, late, absent)


def _absent(found: Collected, group: Group, waiting: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that should be in the group and reported no timeout; empty if they are unknown, or too many."""
    number, description = group
    if description not in ("", "default_pg", "undefined"):
        return ()
    if number not in ("", "0") and not description and len(waiting) < 3:
        return ()
    return absent_ranks(found, waiting)


def absent_ranks(found: Collected, waiting: Collection[int]) -> tuple[int, ...]:
    """Return the ranks of the job that did not wait, if they are a minority; else empty."""
    known = {*found.ranks, *range(max(waiting, default=-1) + 1), *range(found.world_size or 0)}
    absent = known - set(waiting)
    return tuple(sorted(absent)) if len(absent) * 2 <= len(waiting) else ()


def _what(group: Group, waiting: dict[int, Waiting]) -> tuple[str, str, int | None]:
    """Return (text, operation, number) of the operation that ranks waited in."""
    op = next((w.op for w in waiting.values() if w.op), "")
    seq = next((w.seq for w in waiting.values() if w.seq is not None), None)
    number = f" #{seq:,}" if seq is not None else ""
    inside = f" ({label(group)})" if label(group) else ""
    return f"{op or 'collective'}{number}{inside}", op, seq


def _late(
    found: Collected, group: Group, waiting: dict[int, Waiting], late: tuple[int, ...], absent: tuple[int, ...]
) -> Finding:
    what, op, seq = _what(group, waiting)
    ranks = tuple(sorted(waiting))
    culprits = late or absent
    limit_s = next((w.limit_s for w in waiting.values() if w.limit_s), None)
    after = f" after {rough_time(limit_s)}" if limit_s else ""
    start = f"{what} timed out{after}: {rank_list(ranks)} waited in it"
    whole = found.world_size is not None and set(range(found.world_size)) <= set(ranks)
    all_known = whole or (len(ranks) > 1 and ranks == tuple(range(len(ranks))))
    site = _site(waiting)
    if late:
        least = min(w for r in late if (w := _issued(found, group, r)) is not None)
        message = f"{start}, and {rank_list(late)} had issued only #{least:,}"
        advice = f"see what {rank_list(late)} did before{at(site)}: a longer branch, a checkpoint, a data loader, an exception that was caught"
    elif absent:
        message = f"{start}; {rank_list(absent)} reported no timeout, and may be what they waited for"
        advice = f"read the log of {rank_list(absent)}, and take {verb(absent, 'its', 'their')} stack the next time: it did not make the call{at(site)}"
    elif all_known:
        message = f"{start}. No other rank is known from the log"
        advice = "check that all ranks made the same call there, then the network and the GPUs: NCCL_DEBUG=INFO, `dmesg -T | grep -i xid`"
    else:
        others = (
            "the others' logs are needed to see who was missing"
            if len(ranks) > 1
            else "what the other ranks did is not in the log"
        )
        message = f"{start}; {others}"
        advice = "give the logs of all ranks, or the flight recorder's dumps (TORCH_NCCL_TRACE_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1)"
    nobody = not culprits and all_known
    return Finding(
        kind="stall" if nobody else "timeout",
        cause="unknown" if nobody else "late_rank",
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=ranks,
        collective=CollectiveRef(op, label(group), seq) if op else None,
        where=_where(waiting) if not culprits else tuple(Where(r) for r in culprits),
        waiting=_where(waiting),
        message=message + _overslept(waiting),
        cost=NO_PROGRESS_MADE,
        advice=advice,
        evidence=evidence(e for w in waiting.values() for e in w.events[:1]),
    )


def _issued(found: Collected, group: Group, rank: int) -> int | None:
    w = groups_of(found.events).get(group, {}).get(rank)
    return w.issued if w is not None else None


def _site(waiting: dict[int, Waiting]) -> Site | None:
    return next((w.site for w in waiting.values() if w.site is not None), None)


def _where(waiting: dict[int, Waiting]) -> tuple[Where, ...]:
    return tuple(where_at(r, w.site, "waiting") for r, w in sorted(waiting.items()))


def _overslept(waiting: dict[int, Waiting]) -> str:
    late = [
        w
        for w in waiting.values()
        if w.ran_s and w.limit_s and w.ran_s > LATE_FACTOR * w.limit_s and w.ran_s > w.limit_s + LATE_S
    ]
    if not late:
        return ""
    ran_s = max(w.ran_s or 0 for w in late)
    return f". It was noticed only after {rough_time(ran_s)}: these hosts were suspended, or the watchdogs were stuck"


def _different(found: Collected, group: Group, waiting: dict[int, Waiting]) -> Finding | None:
    """Return the finding on ranks whose operations with one number differ; None if they fit."""
    ops: dict[str, list[int]] = {}
    for r, w in waiting.items():
        if w.op:
            ops.setdefault(w.op, []).append(r)
    cause = "op"
    sides = {op: tuple(sorted(ranks)) for op, ranks in ops.items()}
    if len(ops) == 1 and next(iter(ops)) in SAME_SIZES:
        sizes: dict[str, list[int]] = {}
        for r, w in waiting.items():
            if w.size is not None:
                sizes.setdefault(f"{next(iter(ops))} of {w.size:,} elements", []).append(r)
        cause, sides = "shape", {text: tuple(sorted(ranks)) for text, ranks in sizes.items()}
    if len(sides) < 2:
        return None
    by_size = sorted(sides.items(), key=lambda s: len(s[1]))
    culprits = by_size[0][1] if len(by_size[0][1]) < len(by_size[1][1]) and len(by_size) == 2 else ()
    _, op, seq = _what(group, waiting)
    texts = " and ".join(f"{rank_list(ranks)} in {text}" for text, ranks in by_size[:4])
    inside = f" ({label(group)})" if label(group) else ""
    return Finding(
        kind="mismatch",
        cause=cause,
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=tuple(sorted(set(waiting) - set(culprits))),
        collective=CollectiveRef(op, label(group), seq),
        where=_where({r: waiting[r] for r in culprits} or waiting),
        waiting=_where(waiting),
        message=f"the ranks timed out in different calls of collective #{seq:,}{inside}: {texts}",
        cost=NO_PROGRESS_MADE,
        advice="compare what these ranks call there: the same operation with the same size on every rank",
        evidence=evidence(e for w in waiting.values() for e in w.events[:1]),
    )


def _apart(found: Collected, group: Group, waiting: dict[int, Waiting], most: int | None) -> Finding:
    """Return the finding on ranks of one group that timed out in operations with different numbers."""
    by_seq: dict[int, list[int]] = {}
    for r, w in waiting.items():
        by_seq.setdefault(w.seq or 0, []).append(r)
    texts = [
        f"{rank_list(ranks)} in {next((waiting[r].op for r in ranks if waiting[r].op), 'collective')} #{seq:,}"
        for seq, ranks in sorted(by_seq.items())
    ]
    known = bool(label(group))
    few = (
        tuple(sorted(r for seq, ranks in by_seq.items() if seq != most for r in ranks))
        if known and most is not None
        else ()
    )
    shown = ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")
    inside = f" of {label(group)}" if known else ""
    if known:
        tail = "their counts differ: one rank has made more or fewer calls than the others"
        advice = "look for a collective under a condition on the rank, or a loop that is shorter on one rank; the flight recorder's dumps show the first difference"
    else:
        tail = "the log does not name their groups, so it does not show who waited for whom"
        advice = "give the flight recorder's dumps (TORCH_NCCL_TRACE_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1): they name the groups"
    return Finding(
        kind="timeout",
        cause="late_rank",
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=few,
        victims=tuple(sorted(set(waiting) - set(few))),
        where=_where({r: waiting[r] for r in few} or waiting),
        waiting=_where(waiting),
        message=f"ranks timed out in different collectives{inside}: {shown}; {tail}{_overslept(waiting)}",
        cost=NO_PROGRESS_MADE,
        advice=advice,
        evidence=evidence(e for w in waiting.values() for e in w.events[:1]),
    )


def _elsewhere(found: Collected, ranks: set[int], by_group: dict[Group, dict[int, Waiting]]) -> Finding:
    """Return the finding on ranks that dumped because of a timeout in a group that the log does not show."""
    first = sorted(
        {
            int(n)
            for waits in by_group.values()
            for w in waits.values()
            for e in w.events
            if (n := e.fields.get("first", "")).isdecimal() and len(n) < 7
        }
        | {w.rank for waits in by_group.values() for w in waits.values() if not w.signalled}
    )
    seen = f"{rank_list(first)} ran into a timeout first" if first else "a rank ran into a timeout"
    shown = ", ".join(filter(None, (label(g) for g in by_group))) or "the groups in the log"
    return Finding(
        kind="timeout",
        cause="late_rank",
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        victims=tuple(sorted(ranks)),
        message=f"a collective timed out, and {seen}; in {shown} these ranks have nothing in flight: either they are what the others wait for there, or it is another group",
        cost=NO_PROGRESS_MADE,
        advice="give the logs of all ranks from the first `Watchdog caught` on, or the flight recorder's dumps",
        evidence=evidence(e for waits in by_group.values() for w in waits.values() for e in w.events[:1]),
    )
