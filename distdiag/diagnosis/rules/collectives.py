"""Deadlocks and mismatches: what the wait-for graph proves, said in the words of the contract.

One finding for one incident. Ranks that merely wait for a living one are no deadlock: see `WaitGraph.sinks`.
"""

from __future__ import annotations

from collections.abc import Collection

from distdiag.diagnosis.culprit import blame
from distdiag.diagnosis.culprit.blame import Reason
from distdiag.diagnosis.culprit.rank_condition import Source
from distdiag.diagnosis.model.findings import Certainty, Finding, Severity, rank_list
from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Snapshot
from distdiag.diagnosis.rules import conflicts
from distdiag.diagnosis.rules.endings import ends
from distdiag.diagnosis.text.incident import (
    calls_of,
    collective_ref,
    collective_text,
    newest_step,
    places,
    verb,
)
from distdiag.diagnosis.text.phrases import NO_PROGRESS, at
from distdiag.diagnosis.waits import compatible, incidents, messages
from distdiag.diagnosis.waits.graph import Wait, WaitGraph, build
from distdiag.diagnosis.waits.incidents import Incident, Root

NEW_GROUP_ADVICE = "call new_group on all ranks, in the same order, also on those that are not members of the group"

_ECHOES = ("echo", "timeout", "outside")  # ends that another one's end brought


def rules(
    snapshot: Snapshot,
    graph: WaitGraph | None = None,
    *,
    exhausted: Collection[int] = (),
    lost: Collection[int] = (),
    source: Source | None = None,
) -> list[Finding]:
    """Findings `deadlock` and `mismatch` of one snapshot, one for each incident.

    The caller reports a finding once it is the same in two snapshots.

    Args:
        graph: `graph.build(snapshot)`, where the caller has it already.
        exhausted: Ranks known to have run out of batches while others have not; they are the culprits then.
        lost: Ranks that another finding names as lost: that others wait for them is not said again.
        source: Text of a source file, or None: whether a call stands behind a condition on the rank is read from it.
    """
    graph = build(snapshot) if graph is None else graph
    out: list[Finding] = []
    for incident in incidents.find(graph):
        if incident.root is Root.CONFLICT:
            finding = conflicts.conflict(snapshot, graph, incident, exhausted, source)
        elif incident.root is Root.GONE:
            out += _gone(snapshot, graph, incident, exhausted, set(lost))
            continue
        else:
            finding = _cycle(snapshot, incident, exhausted)
        if finding is not None:
            out.append(finding)
    return out


# -- ranks that are gone or stopped ----------------------------------------------------------------------------------


def _cause_of_end(st: RankState) -> str:
    if st.life == Life.STOPPED:
        return "rank_stopped"
    if st.life == Life.FINISHED and not st.exit_code:
        return "rank_finished"
    return "rank_exited"


def _gone(
    snapshot: Snapshot, graph: WaitGraph, incident: Incident, exhausted: Collection[int], lost: set[int]
) -> list[Finding]:
    """The end that came first and is nobody's echo; what it does not explain is said of the next."""
    states, kinds = snapshot.ranks, ends(snapshot)
    out: list[Finding] = []
    left, victims = set(incident.members), set(incident.victims)
    while left and victims:
        first = [q for q in left if kinds.get(q) not in _ECHOES] or sorted(left)
        earliest = min(first, key=lambda q: (states[q].ended_s is None, states[q].ended_s or 0.0, q))
        cause = _cause_of_end(states[earliest])
        named = sorted(q for q in first if _cause_of_end(states[q]) == cause)
        explained = (graph.victims_of(named) & victims) if left != set(named) else victims
        if explained and not set(named) <= lost:
            out.append(_gone_finding(snapshot, graph, incident, exhausted, cause, named, sorted(explained)))
        left -= set(named)
        victims -= explained
    return out


def _gone_finding(
    snapshot: Snapshot,
    graph: WaitGraph,
    incident: Incident,
    exhausted: Collection[int],
    cause: str,
    ended: list[int],
    stuck: list[int],
) -> Finding:
    waits = [w for w in incident.waits if w.missing & set(ended)]
    wait = next((w for w in waits if not w.p2p), waits[0])
    call = next((wait.calls[r] for r in wait.ranks if r in wait.calls), None)
    calls = calls_of(waits)
    culprits, reason = blame.of_gone(snapshot, graph, ended, waits, stuck, exhausted)
    if reason is Reason.HISTORY:
        cause = "missing_rank"
    victims = sorted(set(stuck) - set(culprits))
    return Finding(
        kind="deadlock",
        cause=cause,
        certainty=Certainty.PROVED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=tuple(victims),
        collective=collective_ref(snapshot, wait, call),
        where=places(snapshot, culprits, calls),
        waiting=places(snapshot, victims, calls),
        step=newest_step(snapshot, [*culprits, *stuck]),
        message=_gone_message(snapshot, wait, call, cause, culprits, ended, stuck, reason),
        cost=NO_PROGRESS,
        advice=_gone_advice(cause, culprits, call, reason),
    )


def _ending(states: list[RankState]) -> str:
    st = states[0]
    one = len(states) == 1
    match st.life:
        case Life.STOPPED:
            return f"{'is' if one else 'are'} stopped (SIGSTOP)"
        case Life.KILLED:
            return f"{'was' if one else 'were'} killed" + (f" by signal {st.signal}" if st.signal else "")
        case Life.CRASHED:
            return "ended with an error" + (f" ({st.exception})" if one and st.exception else "")
    if st.exit_code:
        return f"exited with code {st.exit_code}"
    return "ended normally"


def _gone_message(
    snapshot: Snapshot,
    wait: Wait,
    call: Call | None,
    cause: str,
    culprits: tuple[int, ...],
    ended: list[int],
    victims: list[int],
    reason: Reason,
) -> str:
    what = collective_text(snapshot, wait, call)
    ending = f"{rank_list(ended)} {_ending([snapshot.ranks[q] for q in ended])}"
    if reason is Reason.HISTORY:
        return (
            f"{rank_list(culprits)} waits in {what}{at(call.site if call else None)} for ranks that have ended: it has "
            f"made collective calls that the others never made; {ending}"
        )
    if reason is Reason.EXHAUSTED:
        ending = f"{rank_list(culprits)} ran out of batches and {verb(culprits, 'has', 'have')} ended"
    waiting = f"{rank_list(victims)} {verb(victims, 'waits', 'wait')} for {verb(ended, 'it', 'them')}"
    if wait.p2p:
        return f"{ending}; {waiting} in {what}"
    return f"{ending} and {verb(ended, 'has', 'have')} not entered {what}; {waiting}"


def _gone_advice(cause: str, culprits: tuple[int, ...], call: Call | None, reason: Reason) -> str:
    if reason is Reason.EXHAUSTED:
        return "give every rank the same number of batches (drop_last, DistributedSampler), or use Join"
    match cause:
        case "rank_stopped":
            return f"resume it with `kill -CONT` on {rank_list(culprits)}'s process, or end the job"
        case "rank_finished":
            return (
                f"find why {rank_list(culprits)} left the loop before the others: fewer batches, an early return or "
                "break, or an exit (sys.exit, os._exit in a thread) on some ranks only"
            )
        case "missing_rank":
            op = compatible.op_name(call.op) if call is not None else "the collective"
            return f"look for {op} (or a forward of the wrapped model) that only {rank_list(culprits)} runs"
    return f"see the error of {rank_list(culprits)}, then restart the job: the others cannot go on without it"


# -- cycles ----------------------------------------------------------------------------------------------------------


def _cycle(snapshot: Snapshot, incident: Incident, exhausted: Collection[int]) -> Finding:
    culprits, reason = blame.of_cycle(snapshot, incident, exhausted)
    by_message = any(w.p2p for w in incident.waits)
    kind, cause = "deadlock", "p2p_cycle" if by_message else "group_cycle"
    mixed = None if by_message or reason not in (Reason.NONE, Reason.MAJORITY) else _one_site(incident)
    if mixed is not None:
        kind, cause, culprits = "mismatch", "group", mixed
    elif culprits:
        cause = "missing_rank"
    members = incident.members
    victims = incident.victims if culprits else members
    victims = victims - set(culprits)
    calls = calls_of(incident.waits)
    for r in incident.victims:
        st = snapshot.ranks[r]
        if r not in calls and st.blocked is not None:
            calls[r] = (incident.waits[0], st.blocked)
    waits = sorted(incident.waits, key=lambda w: (-len(w.ranks), w.p2p, min(w.ranks)))
    main = next((w for w in waits if not set(culprits) & set(w.ranks)), waits[0])
    call = next((main.calls[r] for r in main.ranks if r in main.calls), None)
    outside = incident.victims - members
    return Finding(
        kind=kind,
        cause=cause,
        certainty=Certainty.PROVED if snapshot.source != "dumps" else Certainty.SUSPECTED,
        severity=Severity.ERROR,
        culprits=culprits,
        victims=tuple(sorted(victims)),
        collective=collective_ref(snapshot, main, call),
        where=places(snapshot, culprits or members, calls),
        waiting=places(snapshot, victims if culprits else outside, calls),
        step=newest_step(snapshot, members),
        message=_cycle_message(snapshot, incident, cause, culprits, main, call),
        cost=NO_PROGRESS,
        advice=_cycle_advice(snapshot, cause, culprits, calls, main),
    )


def _one_site(incident: Incident) -> tuple[int, ...] | None:
    """Two groups used at one and the same call: some ranks were given the other group. Culprits are the minority."""
    if len(incident.waits) != 2:
        return None
    a, b = sorted(incident.waits, key=lambda w: -len(w.ranks))
    sites = {(c.op, c.site) for w in (a, b) for c in w.calls.values()}
    op, site = next(iter(sites))
    if len(sites) != 1 or site is None or a.group == b.group or op == "new_group":
        return None
    return tuple(sorted(b.ranks)) if len(a.ranks) > len(b.ranks) else None


def _cycle_message(
    snapshot: Snapshot,
    incident: Incident,
    cause: str,
    culprits: tuple[int, ...],
    main: Wait,
    call: Call | None,
) -> str:
    parts = []
    order = sorted(incident.waits, key=lambda w: (not set(w.ranks) & set(culprits), min(w.ranks)))
    for w in order[:4]:
        inside = [r for r in w.ranks if r in incident.members]
        c = w.calls.get(inside[0]) if inside else None
        if not inside:
            continue
        parts.append(
            f"{rank_list(inside)} {verb(inside, 'is', 'are')} in {collective_text(snapshot, w, c)}"
            f"{at(c.site if c else None)}"
        )
    more = f" and {len(order) - 4:,} more" if len(order) > 4 else ""
    if culprits and cause == "missing_rank":
        others = sorted(incident.victims - set(culprits))
        if main.p2p:
            done = "sent" if main.key[2] == "recv" else "received"
            return (
                f"{rank_list(culprits)} {verb(culprits, 'has', 'have')} not {done} what {rank_list(main.ranks)} waits for in "
                f"{collective_text(snapshot, main, call)}{at(call.site if call else None)}, and {parts[0]}"
            )
        return (
            f"{rank_list(culprits)} {verb(culprits, 'has', 'have')} not entered {collective_text(snapshot, main, call)}; "
            f"{rank_list(others)} {verb(others, 'waits', 'wait')} for {verb(culprits, 'it', 'them')}, "
            f"and {parts[0]}"
        )
    if cause == "group":
        return f"{', '.join(parts)}{more}: one call, different groups; neither can complete"
    return f"{rank_list(set(incident.members))} wait for each other: {', '.join(parts)}{more}"


def _cycle_advice(
    snapshot: Snapshot, cause: str, culprits: tuple[int, ...], calls: dict[int, tuple[Wait, Call]], main: Wait
) -> str:
    match cause:
        case "missing_rank":
            call = calls[culprits[0]][1] if culprits and culprits[0] in calls else None
            if call is not None and call.op == "new_group":
                return NEW_GROUP_ADVICE
            what = f"{compatible.op_name(call.op)}{at(call.site)}" if call is not None else "the call"
            if main.p2p:
                other = "send to" if main.key[2] == "recv" else "recv from"
                return f"look for the {other} {rank_list(main.ranks)} that {rank_list(culprits)} has left out before {what}"
            return f"look for a condition on the rank around {what}: all ranks it concerns must come to it, or none"
        case "p2p_cycle":
            ends = {r: c for r, (_, c) in calls.items() if c.p2p}
            for r, c in sorted(ends.items()):
                other = ends.get(c.peer) if c.peer is not None else None
                if (
                    other is not None
                    and other.peer == r
                    and other.tag != c.tag
                    and messages.direction_of(other) != messages.direction_of(c)
                ):
                    return f"tags {c.tag} and {other.tag} never match: a message needs the same tag at both of its ends"
            return (
                "pair sends with receives: isend/irecv or batch_isend_irecv, or let one side receive first; check tags"
            )
        case "group":
            return "pass the same process group on all ranks at this call"
    if any(c.op == "new_group" for _, c in calls.values()):
        return NEW_GROUP_ADVICE
    return "use the groups in the same order on all ranks that share them"
