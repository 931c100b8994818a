"""Findings on the incidents in dumps: a late rank, a stall or deadlock, unmatched messages, operations in flight."""

from __future__ import annotations

from collections import Counter

from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.text.cycle import NEW_GROUP_ADVICE
from distdiag.diagnosis.text.incident import collective_ref, collective_text, group_label, verb
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at, where_at
from distdiag.diagnosis.waits import compatible
from distdiag.diagnosis.waits.wait import Wait, call_at
from distdiag.sources.dumps.culprits import Blame
from distdiag.sources.dumps.late_ranks import LateRanks
from distdiag.sources.dumps.load_report import LoadReport
from distdiag.sources.dumps.missing import any_call, where_of
from distdiag.terms.units import rough_duration

DUMPED_WITHIN_S = 300.0  # after the timeout; a later file time may be that of a copy


def late_rank(snapshot: Snapshot, loaded: LoadReport, blame: Blame, late: LateRanks) -> Finding:
    """Return the finding on a collective that timed out, and the ranks that issued it after that."""
    culprits = tuple(sorted(late.late_s))
    calls = {q: call_at(st, late.group, late.seq) for q, st in snapshot.ranks.items()}
    call = next((calls[q] for q in culprits if calls.get(q) is not None), None)
    name = compatible.op_name(call.op) if call is not None and call.op else "collective"
    what = f"{name} #{late.seq:,} ({group_label(snapshot, late.group)})"
    others = tuple(sorted(set(blame.victims) - set(culprits))) or late.others
    sites = {q: c.site for q in culprits if (c := calls.get(q)) is not None}
    return Finding(
        kind="timeout",
        cause="late_rank",
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=others,
        where=tuple(where_at(q, sites.get(q)) for q in culprits),
        waiting=where_of(snapshot, others, blame),
        message=f"{rank_list(culprits)} issued {what} {rough_duration(max(late.late_s.values()))} after the first rank of its "
        f"group; the timeout is {rough_duration(late.timeout_s)}, so the others had given up",
        cost="the job ends with a timeout",
        advice=f"see what {rank_list(culprits)} did before{at(next(iter(sites.values()), None))}; where that may take so long, give "
        "init_process_group or new_group a longer timeout",
        evidence=tuple(p for r in culprits[:8] for p in loaded.files.get(r, ())),
    )


def stall(snapshot: Snapshot, loaded: LoadReport, blame: Blame, young: bool) -> Finding:
    main = blame.main
    call = any_call(main) if main is not None else None
    culprits = blame.extra or blame.culprits
    what = _awaited(snapshot, main, culprits)
    made_by, unmade = _half_made(snapshot, loaded, blame)
    culprits = loaded.without_group[unmade] if unmade else culprits
    message, advice = _wording(snapshot, blame, culprits, what, made_by, unmade)
    if young:
        message, advice = (
            _wording_if_running(culprits, what),
            "take a second set of dumps: if the numbers have not moved, it hangs",
        )
    kind, cause = _kind_of(blame, culprits, unmade)
    return Finding(
        kind=kind,
        cause=cause,
        certainty=Certainty.SUSPECTED,
        severity=Severity.INFO if young else Severity.ERROR,
        culprits=culprits,
        victims=tuple(sorted({*blame.victims, *blame.culprits} - set(culprits))),
        collective=collective_ref(snapshot, main, call) if main is not None else None,
        where=where_of(snapshot, culprits or blame.victims, blame),  # without a culprit, list the site of each victim
        waiting=where_of(snapshot, blame.victims, blame),
        message=message,
        cost="none known: the job was running when the dumps were taken" if young else NO_PROGRESS,
        advice=advice,
        evidence=tuple(p for r in culprits[:8] for p in loaded.files.get(r, ())),
    )


def _awaited(snapshot: Snapshot, main: Wait | None, culprits: tuple[int, ...]) -> str:
    """Return what the others wait in; of a message, the end that is missing."""
    if main is None:
        return "a collective"
    if not main.p2p or main.key[4] not in culprits:
        return collective_text(snapshot, main, any_call(main))
    sends = main.key[2] == "send"
    here, there = ("recv", "send") if sends else ("send", "recv")
    return f"the {here} that matches rank {main.key[3]:,}'s {there} ({group_label(snapshot, main.group)})"


def _kind_of(blame: Blame, culprits: tuple[int, ...], unmade: str) -> tuple[str, str]:
    """Return (kind, cause): a deadlock if the dumps show how the ranks wait for each other, else a stall."""
    if blame.extra or unmade:
        return "deadlock", "missing_rank"
    if blame.crossed:
        return "deadlock", "group_cycle"
    if blame.circle and not culprits:
        return "deadlock", "p2p_cycle" if blame.circle[0].p2p else "group_cycle"
    return "stall", "unknown"


def _wording_if_running(culprits: tuple[int, ...], what: str) -> str:
    who = (
        f"{rank_list(culprits)} {verb(culprits, 'was', 'were')} on {verb(culprits, 'its', 'their')} way to {what}"
        if culprits
        else f"{what} was in flight"
    )
    return f"{who} when the dumps were taken: a running job"


def _wording(
    snapshot: Snapshot, blame: Blame, culprits: tuple[int, ...], what: str, made_by: tuple[int, ...], unmade: str
) -> tuple[str, str]:
    """Return (message, advice) of a stall."""
    who, is_, has = rank_list(culprits), verb(culprits, "is", "are"), verb(culprits, "has", "have")
    if blame.extra:
        return (
            f"{who} {is_} in {what}, which none of the other {len(blame.victims):,} ranks has entered; they have nothing in flight",
            f"look for a collective that only {who} {verb(culprits, 'calls', 'call')}",
        )
    if unmade:
        message = (
            f"{who} never created group {group_label(snapshot, unmade)}, which {rank_list(made_by)} {verb(made_by, 'has', 'have')} "
            f"created and not used yet; {verb(made_by, 'it has', 'they have')} not entered {what}, where the others wait"
        )
        return message, NEW_GROUP_ADVICE
    if blame.circle and not culprits:
        texts = [f"rank {r:,} in {collective_text(snapshot, w, w.calls[r])}" for w in blame.circle for r in w.ranks]
        shown = ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")
        return (
            f"ranks wait for each other in a cycle: {shown}; on each rank, the op that another waits for is queued behind its own",
            "let every second rank receive before it sends, or use batch_isend_irecv",
        )
    if blame.crossed:
        texts = [f"{rank_list(ranks)} issued {collective_text(snapshot, w, any_call(w))}" for w, ranks in blame.crossed]
        return (
            f"{' first, and '.join(texts)} first: each waits for ranks that run it second",
            "use the groups in the same order on all ranks that share them",
        )
    victims = f"{len(blame.victims):,} ranks wait" if len(blame.victims) > 8 else (
        f"{rank_list(blame.victims)} {verb(blame.victims, 'waits', 'wait')}"
    )  # fmt: skip
    on_host = blame.main is not None and snapshot.groups[blame.main.group].backend == "gloo"
    main = blame.main
    lack = f"{has} issued {what} but not begun it" if blame.behind == culprits else f"{has} not entered {what}"
    members = snapshot.groups[main.group].ranks if main is not None and not main.p2p else culprits
    here, elsewhere = tuple(q for q in culprits if q in members), tuple(q for q in culprits if q not in members)
    if here and elsewhere and blame.behind != culprits:
        who, has = rank_list(here), verb(here, "has", "have")
        lack = f"{has} not entered {what}, nor {rank_list(elsewhere)} what other groups wait in"
    return f"{who} {lack}; {victims} for {verb(culprits, 'it', 'them')}{_condition(blame, on_host)}", _advice(
        blame, on_host
    )


def _half_made(snapshot: Snapshot, loaded: LoadReport, blame: Blame) -> tuple[tuple[int, ...], str]:
    """Return (ranks, group) if the stopped ranks may all wait for a group that a member never created; else nothing.

    A communicator is created before its first operation is recorded, and its members wait for each other during that.
    """
    for name, without in loaded.without_group.items():
        members = set(snapshot.groups[name].ranks) - set(without)
        used = any(name in st.enqueued for st in snapshot.ranks.values())
        if not used and blame.idle and set(blame.idle) == set(blame.culprits) <= members:
            return blame.culprits, name
    return (), ""


def _condition(blame: Blame, on_host: bool) -> str:
    parts = []
    if blame.idle:
        whose = "" if len(blame.idle) == len(blame.culprits) else f" ({rank_list(blame.idle)})"
        parts.append(f"no collective is in flight there{whose}: the CPU side launched no more")
    if blame.device:
        whose = "" if len(blame.device) == len(blame.culprits) else f" ({rank_list(blame.device)})"
        parts.append(
            f"what is in flight there has completed on all other ranks{whose}{'' if on_host else ': the device stopped'}"
        )
    return f"; {'; '.join(parts)}" if parts else ""


def _advice(blame: Blame, on_host: bool) -> str:
    who = rank_list(blame.culprits)
    if blame.device and not blame.idle and not on_host:
        return f"look at the GPUs of {who}: `dmesg -T | grep -i xid`, ECC counters; then at their processes' stacks"
    if blame.idle and not blame.device:
        return f"take the stacks of {who} (`py-spy dump --native --pid …`): Python code, a lock, the data loader, or the GIL"
    return (
        f"look at {who} first: its stack (`py-spy dump --native --pid …`), its GPU (`dmesg -T | grep -i xid`), its host"
    )


def unmatched_messages(snapshot: Snapshot, loaded: LoadReport) -> Finding | None:
    """Return the finding on unmatched messages; the culprit is the rank with most of them."""
    calls = [(r, c) for r, cs in sorted(loaded.unmet.items()) for c in cs]
    ends = Counter(q for r, c in calls for q in (r, c.peer) if q is not None)
    most = ends.most_common(2)
    if not most:
        return None
    culprits = (most[0][0],) if len(most) == 1 or most[0][1] > most[1][1] else ()
    members = tuple(sorted(ends))
    texts = [
        f"rank {r}'s {c.op} {'to' if c.op == 'send' else 'from'} rank {c.peer}{at(c.site)}"
        for r, c in sorted(calls, key=lambda x: x[0] not in culprits)[:3]
    ]
    victims = [r for r, st in snapshot.ranks.items() if st.calls and r not in culprits]
    sites = {r: c.site for r, c in reversed(calls)}
    return Finding(
        kind="deadlock",
        cause="p2p_cycle",
        certainty=Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=tuple(sorted(victims)),
        where=tuple(where_at(r, sites.get(r), "waiting" if sites.get(r) else None) for r in culprits or members),
        message=f"no matching call for {', '.join(texts)} ({group_label(snapshot, calls[0][1].group)}), and the other "
        f"{verb(texts, 'end has', 'ends have')} issued later messages",
        cost=NO_PROGRESS,
        advice="compare peers and tags at both ends of these messages: what one rank sends, the other must receive",
        evidence=tuple(p for r in members[:8] for p in loaded.files.get(r, ())),
    )


def _timed_out(loaded: LoadReport, w: Wait) -> bool:
    """True if the watchdog timed it out, or the dump or its file was written after the group's timeout."""
    limit_s = loaded.timeout_s
    for r, call in w.calls.items():
        if call.timed_out:
            return True
        if call.entered_s is None or not limit_s:
            continue
        written, asked = loaded.modified_s.get(r), loaded.asked_s.get(r)
        if asked is not None and asked - call.entered_s >= limit_s:
            return True
        if written is not None and limit_s <= written - call.entered_s <= limit_s + DUMPED_WITHIN_S:
            return True
    return False


def in_flight(snapshot: Snapshot, loaded: LoadReport, blame: Blame) -> Finding:
    given_up = [w for w in blame.in_flight if _timed_out(loaded, w)]
    w = (given_up or blame.in_flight)[0]
    call = any_call(w)
    ranks = tuple(sorted({r for x in blame.in_flight for r in x.ranks}))
    what = collective_text(snapshot, w, call)
    return Finding(
        kind="stall",
        cause="unknown",
        severity=Severity.ERROR if given_up else Severity.INFO,
        victims=ranks,
        collective=collective_ref(snapshot, w, call),
        waiting=where_of(snapshot, ranks, blame) if given_up else (),
        message=f"{what} ran into its timeout with no rank missing: a link or a device between these ranks stopped"
        if given_up
        else f"{what} was in flight with no rank missing: a running job, or a link or device that stopped",
        cost=NO_PROGRESS if given_up else "none known",
        advice="check the network and the GPUs of these ranks: NCCL_DEBUG=INFO, `dmesg -T | grep -i xid`, `distdiag probe pairs`"
        if given_up
        else "take a second set of dumps: if the numbers have not moved, check the network between these ranks",
    )
