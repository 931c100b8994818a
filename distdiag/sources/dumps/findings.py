"""Findings on the incidents in dumps: a late rank, a stall or deadlock, unmatched messages, operations in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from distdiag.diagnosis import kinds
from distdiag.diagnosis.model.findings import Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.text.cycle import NEW_GROUP_ADVICE
from distdiag.diagnosis.text.incident import collective_ref, collective_text, group_label
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at, where_at
from distdiag.diagnosis.text.template import Template, filled
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait, call_at
from distdiag.sources.dumps.culprits import Blame
from distdiag.sources.dumps.late_ranks import LateRanks
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.missing import any_call, evidence_of, where_of

DUMPED_WITHIN_S = 300.0  # after the timeout; a later file time may be that of a copy

_LATE = Template(
    kinds.TIMEOUT,
    "late_rank",
    "{culprits} issued {what} {late:time} after the first rank of its group; the timeout is {limit:time}, so the others "
    "had given up",
    "the job ends with a timeout",
    "see what {culprits} did before{site}; where that may take so long, give init_process_group or new_group a longer timeout",
)
_EXTRA = Template(
    kinds.DEADLOCK,
    "missing_rank",
    "{culprits} {culprits:is|are} in {what}, which none of the other {victims:#} ranks has entered; they have nothing in "
    "flight",
    NO_PROGRESS,
    "look for a collective that only {culprits} {culprits:calls|call}",
)
_UNMADE = Template(
    kinds.DEADLOCK,
    "missing_rank",
    "{culprits} never created group {group}, which {made_by} {made_by:has|have} created and not used yet; "
    "{made_by:it has|they have} not entered {what}, where the others wait",
    NO_PROGRESS,
    NEW_GROUP_ADVICE,
)
_CYCLE = Template(
    kinds.DEADLOCK,
    "group_cycle",
    "ranks wait for each other in a cycle: {calls}; on each rank, the op that another waits for is queued behind its own",
    NO_PROGRESS,
    "let every second rank receive before it sends, or use batch_isend_irecv",
)
_CROSSED = Template(
    kinds.DEADLOCK,
    "group_cycle",
    "{calls} first: each waits for ranks that run it second",
    NO_PROGRESS,
    "use the groups in the same order on all ranks that share them",
)
_STALL = Template(
    kinds.STALL, "unknown", "{lack}; {waiters} for {culprits:it|them}{condition}", NO_PROGRESS, "{advice}"
)
_UNMATCHED = Template(
    kinds.DEADLOCK,
    "p2p_cycle",
    "no matching call for {calls} ({group}), and the other {n:end has|ends have} issued later messages",
    NO_PROGRESS,
    "compare peers and tags at both ends of these messages: what one rank sends, the other must receive",
)
_TIMED_OUT = Template(
    kinds.STALL,
    "unknown",
    "{what} ran into its timeout with no rank missing: a link or a device between these ranks stopped",
    NO_PROGRESS,
    "check the network and the GPUs of these ranks: NCCL_DEBUG=INFO, `dmesg -T | grep -i xid`, `distdiag probe pairs`",
)
_IN_FLIGHT = Template(
    kinds.STALL,
    "unknown",
    "{what} was in flight with no rank missing: a running job, or a link or device that stopped",
    "none known",
    "take a second set of dumps: if the numbers have not moved, check the network between these ranks",
    severity=Severity.INFO,
)
# instead of the sentences of a stall or deadlock, if the job was running
_RUNNING: dict[str, Any] = {
    "message": "{on_way} when the dumps were taken: a running job",
    "cost": "none known: the job was running when the dumps were taken",
    "advice": "take a second set of dumps: if the numbers have not moved, it hangs",
    "severity": Severity.INFO,
}
_DEVICE_ADVICE = "look at the GPUs of {who}: `dmesg -T | grep -i xid`, ECC counters; then at their processes' stacks"
_HOST_ADVICE = (
    "take the stacks of {who} (`py-spy dump --native --pid …`): Python code, a lock, the data loader, or the GIL"
)
_EITHER_ADVICE = (
    "look at {who} first: its stack (`py-spy dump --native --pid …`), its GPU (`dmesg -T | grep -i xid`), its host"
)


def late_rank(snapshot: Snapshot, loaded: LoadReport, blame: Blame, late: LateRanks) -> Finding:
    """Return the finding on a collective that timed out, and the ranks that issued it after that."""
    culprits = tuple(sorted(late.late_s))
    calls = {q: c for q in culprits if (c := call_at(snapshot.ranks[q], late.group, late.seq)) is not None}
    name = next((compatible.op_name(c.op) for c in calls.values()), "") or "collective"
    others = tuple(sorted(set(blame.victims) - set(culprits))) or late.others
    sites = {q: c.site for q, c in calls.items()}
    return _LATE(
        culprits=culprits,
        victims=others,
        where=(where_at(q, sites.get(q)) for q in culprits),
        waiting=where_of(snapshot, others, blame),
        evidence=evidence_of(loaded, culprits),
        what=f"{name} #{late.seq:,} ({group_label(snapshot, late.group)})",
        late=max(late.late_s.values()),
        limit=late.timeout_s,
        site=next(iter(sites.values()), None),
    )


def stall(snapshot: Snapshot, loaded: LoadReport, blame: Blame, young: bool) -> Finding:
    """Return the finding on ranks that others wait for: a deadlock if the dumps show how they wait for each other."""
    main = blame.main
    culprits = blame.culprits
    what = _awaited(snapshot, main, culprits)
    unmade = _half_made(snapshot, loaded, blame)
    facts: dict[str, Any] = {"what": what}
    cause = None
    if blame.alone:
        template = _EXTRA
    elif unmade:
        template, culprits = _UNMADE, loaded.without_group[unmade]
        facts |= {"made_by": blame.culprits, "group": group_label(snapshot, unmade)}
    elif blame.circle and not culprits:
        template, cause = _CYCLE, "p2p_cycle" if blame.circle[0].p2p else "group_cycle"
        calls = [f"rank {r:,} in {collective_text(snapshot, w, w.calls[r])}" for w in blame.circle for r in w.ranks]
        facts["calls"] = ", ".join(calls[:4]) + (", …" if len(calls) > 4 else "")
    elif blame.crossed:
        template = _CROSSED
        calls = [f"{rank_list(ranks)} issued {collective_text(snapshot, w, any_call(w))}" for w, ranks in blame.crossed]
        facts["calls"] = " first, and ".join(calls)
    else:
        template = _STALL
        facts |= _stall_facts(snapshot, blame, culprits, what)
    if young:
        template = replace(template, **_RUNNING)
        way = (
            "{culprits} {culprits:was|were} on {culprits:its|their} way to {what}"
            if culprits
            else "{what} was in flight"
        )
        facts["on_way"] = filled(way, culprits=culprits, what=what)
    return template(
        cause=cause,
        culprits=culprits,
        victims=sorted({*blame.victims, *blame.culprits} - set(culprits)),
        collective=collective_ref(snapshot, main, any_call(main)) if main is not None else None,
        where=where_of(snapshot, culprits or blame.victims, blame),  # without a culprit, list the site of each victim
        waiting=where_of(snapshot, blame.victims, blame),
        evidence=evidence_of(loaded, culprits),
        **facts,
    )


def _awaited(snapshot: Snapshot, main: Wait | None, culprits: tuple[int, ...]) -> str:
    """Return what the others wait in; of a message, the end that is missing."""
    if main is None:
        return "a collective"
    if not main.p2p or main.key[4] not in culprits:
        return collective_text(snapshot, main, any_call(main))
    here, there = ("recv", "send") if main.key[2] == "send" else ("send", "recv")
    return f"the {here} that matches rank {main.key[3]:,}'s {there} ({group_label(snapshot, main.group)})"


def _stall_facts(snapshot: Snapshot, blame: Blame, culprits: tuple[int, ...], what: str) -> dict[str, str]:
    """Return what the template of a stall names: what the culprits lack, who waits, how they stopped, what to do."""
    main = blame.main
    behind = blame.behind == culprits
    members = snapshot.groups[main.group].ranks if main is not None and not main.p2p else culprits
    here, elsewhere = [q for q in culprits if q in members], [q for q in culprits if q not in members]
    if behind:
        lack = "{culprits} {culprits:has|have} issued {what} but not begun it"
    elif here and elsewhere:
        lack = "{here} {here:has|have} not entered {what}, nor {elsewhere} what other groups wait in"
    else:
        lack = "{culprits} {culprits:has|have} not entered {what}"
    waiters = "{victims:#} ranks wait" if len(blame.victims) > 8 else "{victims} {victims:waits|wait}"
    on_host = main is not None and snapshot.groups[main.group].backend == "gloo"
    stopped = "" if on_host else ": the device stopped"
    parts = (
        (blame.idle, "no collective is in flight there{whose}: the CPU side launched no more"),
        (blame.device, "what is in flight there has completed on all other ranks{whose}" + stopped),
    )
    if blame.device and not blame.idle and not on_host:
        advice = _DEVICE_ADVICE
    else:
        advice = _HOST_ADVICE if blame.idle and not blame.device else _EITHER_ADVICE
    return {
        "lack": filled(lack, culprits=culprits, here=here, elsewhere=elsewhere, what=what),
        "waiters": filled(waiters, victims=blame.victims),
        "condition": "".join("; " + filled(text, whose=_whose(ranks, culprits)) for ranks, text in parts if ranks),
        "advice": filled(advice, who=blame.culprits),
    }


def _whose(ranks: Collection[int], culprits: Collection[int]) -> str:
    return "" if len(ranks) == len(culprits) else f" ({rank_list(ranks)})"


def _half_made(snapshot: Snapshot, loaded: LoadReport, blame: Blame) -> str:
    """Return the group for which the stopped ranks may all wait, as a member never created it; else an empty text.

    A communicator is created before its first operation is recorded, and its members wait for each other during that.
    """
    for name, without in loaded.without_group.items():
        members = set(snapshot.groups[name].ranks) - set(without)
        used = any(name in state.enqueued for state in snapshot.ranks.values())
        if not used and blame.idle and set(blame.idle) == set(blame.culprits) <= members:
            return name
    return ""


def unmatched_messages(snapshot: Snapshot, loaded: LoadReport) -> Finding | None:
    """Return the finding on unmatched messages; the culprit is the rank with most of them."""
    calls = [(rank, call) for rank, mine in sorted(loaded.unmet.items()) for call in mine]
    ends = Counter(q for rank, call in calls for q in (rank, call.peer) if q is not None)
    most = ends.most_common(2)
    if not most:
        return None
    culprits = (most[0][0],) if len(most) == 1 or most[0][1] > most[1][1] else ()
    members = tuple(sorted(ends))
    texts = [
        f"rank {rank}'s {call.op} {'to' if call.op == 'send' else 'from'} rank {call.peer}{at(call.site)}"
        for rank, call in sorted(calls, key=lambda x: x[0] not in culprits)[:3]
    ]
    sites = {rank: call.site for rank, call in reversed(calls)}
    return _UNMATCHED(
        culprits=culprits,
        victims=sorted(r for r, state in snapshot.ranks.items() if state.calls and r not in culprits),
        where=(where_at(r, sites.get(r), "waiting" if sites.get(r) else None) for r in culprits or members),
        evidence=evidence_of(loaded, members),
        calls=", ".join(texts),
        n=len(texts),
        group=group_label(snapshot, calls[0][1].group),
    )


def _timed_out(loaded: LoadReport, w: Wait) -> bool:
    """True if the watchdog timed it out, or the dump or its file was written after the group's timeout."""
    limit_s = loaded.timeout_s
    for r, call in w.calls.items():
        if call.timed_out:
            return True
        if call.entered_s is None or not limit_s:
            continue
        written, asked = loaded.times[r].written_s, loaded.times[r].asked_s
        if asked is not None and asked - call.entered_s >= limit_s:
            return True
        if written is not None and limit_s <= written - call.entered_s <= limit_s + DUMPED_WITHIN_S:
            return True
    return False


def in_flight(snapshot: Snapshot, loaded: LoadReport, blame: Blame) -> Finding:
    """Return the finding on operations that all ranks have issued and none has completed."""
    given_up = [w for w in blame.in_flight if _timed_out(loaded, w)]
    wait = (given_up or blame.in_flight)[0]
    call = any_call(wait)
    ranks = sorted({r for w in blame.in_flight for r in w.ranks})
    return (_TIMED_OUT if given_up else _IN_FLIGHT)(
        victims=ranks,
        collective=collective_ref(snapshot, wait, call),
        waiting=where_of(snapshot, ranks, blame) if given_up else (),
        what=collective_text(snapshot, wait, call),
    )
