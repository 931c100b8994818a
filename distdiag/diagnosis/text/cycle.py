"""Text for ranks that wait for each other."""

from __future__ import annotations

import re

from msgspec.structs import replace

from distdiag.diagnosis.culprit.verdict import Verdict
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState, Snapshot
from distdiag.diagnosis.text import evidence
from distdiag.diagnosis.text.incident import collective_text
from distdiag.diagnosis.text.phrases import at, op_at, op_text
from distdiag.diagnosis.text.template import filled
from distdiag.diagnosis.training_data import short_last_batch
from distdiag.diagnosis.waits import compatible, messages
from distdiag.diagnosis.waits.wait import Wait
from distdiag.terms.backends import in_group_communicator

_SAME_TAG = (
    "a message needs the same tag at both of its ends; compute it in the same way from values that both ranks have"
)
_HASHED = ", not by hash() of a string, which differs between processes"
NEW_GROUP_ADVICE = "call new_group on all ranks, in the same order, also on those that are not members of the group"
_PARTNERS = (
    "no message has its other end: ranks may have chosen partners that chose others: draw them with one seed on all ranks, or let one "
    "rank choose and broadcast the pairs; else {order}check peers, tags and how many messages each side makes"
)
_ORDER = "{rank} is in {own} before it {makes}s what {waiting} waits for{earlier}: let {rank} {makes} that first, or use i{op}{there}"
_EARLIER = 4  # messages of a rank in one line, at least, all with one peer: that is no partner which it chooses
_ONE_MORE = (
    "see whether {waiting} {waiting:makes|make} one message more, or another rank one fewer: a `continue` or `return` before it, a shorter loop; "
    "else check peers and tags"
)
_LAST_BATCH = "use drop_last=True, or let all ranks take the number of messages from the batch that they have"
SHOWN = 4  # waits of the cycle
_MISSING = (
    "{culprits} {culprits:has|have} not entered {what}; {waiting} {waiting:waits|wait} for {culprits:it|them}{in_turn}, and "
    "{first}{reason}"
)
_MESSAGE_MISSING = (
    "{culprits} {culprits:has|have} not {done} what {waiting} {waiting:waits|wait} for in {what}{site}, and "
    "{first}{reason}"
)
_LEFT_OUT = "look for a condition that leads {culprits} past {op}{site}: all members of its group must make it, or none"
_FIRST = "; it is enough that rank {rank} calls {op}{site} before {other}{own}"
_FIRST_OF_A_PAIR = {
    "recv": ", or let one rank send before it receives",
    "send": ", or let one rank receive before it sends",
}


def message(snapshot: Snapshot, verdict: Verdict) -> str:
    """Return who waits where, and for whom; for a culprit, why it is not at the call that the others wait for."""
    incident, culprits, main, call = verdict.incident, verdict.culprits, verdict.wait, verdict.call
    order = sorted(incident.waits, key=lambda w: (not set(w.ranks) & set(culprits), min(w.ranks)))
    parts = [text for w in order[:SHOWN] if (text := _wait_text(snapshot, verdict, w))]
    more = f" and {len(order) - SHOWN:,} more" if len(order) > SHOWN else ""
    if culprits and verdict.cause == "missing_rank":
        absent = [rank for rank in culprits if rank in main.missing] or list(culprits)
        stuck = sorted(incident.victims - set(culprits)) if len(absent) == len(culprits) else main.ranks
        direct = [rank for rank in stuck if rank in main.ranks] or stuck
        rest = [rank for rank in stuck if rank not in direct]
        return filled(
            _MESSAGE_MISSING if main.p2p else _MISSING,
            culprits=absent, waiting=main.ranks if main.p2p else direct, in_turn=f", {rank_list(rest)} in turn" if rest else "",
            done="sent" if main.p2p and main.key[2] == "recv" else "received", site=call.site if call else None,
            what=collective_text(snapshot, main, call), first=parts[0], reason=evidence.reason_text(verdict),
        )  # fmt: skip
    if verdict.cause == "group":
        return f"{', '.join(parts)}{more}: one call, different groups; neither can complete"
    return f"{rank_list(set(incident.members))} wait for each other: {', '.join(parts)}{more}{evidence.reason_text(verdict)}"


def _wait_text(snapshot: Snapshot, verdict: Verdict, wait: Wait) -> str:
    inside = [r for r in wait.ranks if r in verdict.incident.members]
    call = wait.calls.get(inside[0]) if inside else None
    what, site = collective_text(snapshot, wait, call), call.site if call else None
    return filled("{ranks} {ranks:is|are} in {what}{site}", ranks=inside, what=what, site=site) if inside else ""


def advice(snapshot: Snapshot, verdict: Verdict, calls: dict[int, tuple[Wait, Call]]) -> str:
    """Return what to change; of messages that are missing in a loader's last, smaller batch, that first."""
    of = [r for q in sorted(verdict.incident.members) if (r := snapshot.ranks.get(q)) is not None]
    first = (x for r in of for x in r.loaders if x.iterations_started == 1 and not x.exhausted)
    last = next((found for x in first if (found := short_last_batch(x)) is not None), None)
    other = _advice(snapshot, verdict, calls)
    if last is None or not any(wait.p2p for wait in verdict.waits):
        return other
    n, size = last
    return f"this is the last batch of the epoch, {n} of {size} samples: {_LAST_BATCH}; else {other}"


def _advice(snapshot: Snapshot, verdict: Verdict, calls: dict[int, tuple[Wait, Call]]) -> str:
    if _batched_at_one_end(snapshot, verdict):
        return (
            "use batch_isend_irecv at both ends of a message, or at none: on NCCL a batch uses the group's communicator, a "
            "single send or recv that of the two ranks, and messages never match across them"
        )
    match verdict.cause:
        case "missing_rank":
            return evidence.advice(verdict) or _missing_advice(verdict, calls)
        case "p2p_cycle":
            if (tagged := _other_tag(snapshot, calls)) is not None:
                tags = " and ".join(f"{call.tag} of {op_at(call)}" for call in tagged)
                files = {call.site.file for call in tagged if call.site is not None}
                hashed = any(re.search(r"\bhash\(", verdict.case.source(file) or "") for file in files)
                return f"tags {tags} never match: {_SAME_TAG}{_HASHED if hashed else ''}"
            if not verdict.culprits and (advised := evidence.advice(verdict)):
                return advised
            ends = {messages.direction_of(c) if c.p2p else c.op for _, c in calls.values()}
            first = _FIRST_OF_A_PAIR.get(ends.pop(), "") if len(ends) == 1 else ""
            mutual = any(c.peer in calls and calls[c.peer][1].peer == q for q, (_, c) in calls.items())
            if not first and not mutual:
                by_message = [q for q, (_, c) in calls.items() if c.p2p]
                order, fixed = _order(snapshot, calls)
                if order and fixed:
                    return order
                partners = filled(_PARTNERS, order=f"{order}; or " if order else "")
                return partners if len(by_message) == len(calls) else filled(_ONE_MORE, waiting=by_message)
            pair = f"pair sends with receives: isend/irecv or batch_isend_irecv{first}"
            equal = "see whether both sides make equally many messages (micro-batches, a shorter last batch), with these peers and tags"
            return f"{pair}; else {equal}" if first else f"{equal}; if so, {pair}"
        case "group":
            return "pass the same process group on all ranks at this call"
    if any(c.op == "new_group" for _, c in calls.values()):
        return NEW_GROUP_ADVICE
    order = "use the groups in the same order on all ranks that share them"
    if {c.op for _, c in calls.values()} == {"barrier"}:
        order += "; barriers that are to meet must be of one group"
    advised = verdict.testimony.advice or ("" if verdict.culprits else evidence.advice(verdict))
    return advised or order + _first_text(verdict, calls)


def _order(snapshot: Snapshot, calls: dict[int, tuple[Wait, Call]]) -> tuple[str, bool]:
    """Return which message a rank should make before the one that it is in, and True if the receivers' earlier messages show that ranks
    do not choose their peers; nothing if no rank is in a message of the direction that another one waits for."""
    messages_of = {q: call for q, (_, call) in calls.items() if call.p2p}
    ways = {q: messages.direction_of(call) for q, call in messages_of.items()}
    found = [
        (ways[r] == "recv", r, q) for q, call in messages_of.items() if (r := call.peer) in ways and ways[q] != ways[r]
    ]
    if not found:
        return "", False
    _, rank, waiting = min(found)
    own = messages_of[rank]
    before = messages.other_end(snapshot.ranks[rank], waiting, messages_of[waiting])
    receives_first = ways[rank] == "send" and own.peer in ways and ways[own.peer] == "recv"
    text = filled(
        _ORDER, rank=[rank], own=f"{op_text(own)}{_line(own)}", op=ways[rank], makes={"send": "send", "recv": "receive"}[ways[rank]],
        waiting=[waiting], earlier=f" (earlier{_line(before)})" if before is not None and before.site is not None else "",
        there=f", or let rank {own.peer} receive that of rank {rank} first" if receives_first else "",
    )  # fmt: skip
    receivers = ((snapshot.ranks[q], call) for q, call in messages_of.items() if ways[q] == "recv")
    return text, all(_has_one_peer(state, call) for state, call in receivers)


def _line(call: Call) -> str:
    return at(call.site and replace(call.site, caller=None))


def _has_one_peer(state: RankState, call: Call) -> bool:
    """True if a rank's messages in the line of this one, whoever called it, all have its peer."""
    here = (call.site.file, call.site.line) if call.site is not None else None
    peers = [c.peer for c in state.calls if c.p2p and c.site is not None and (c.site.file, c.site.line) == here]
    return len(peers) > _EARLIER and set(peers) == {call.peer}


def _first_text(verdict: Verdict, calls: dict[int, tuple[Wait, Call]]) -> str:
    """Return the smallest edit that breaks the cycle: one rank makes the call that another waits for before its own."""
    members = verdict.incident.members
    if any(len(w.missing & members) != 1 for w in verdict.incident.waits):
        return ""  # one edit may not break several cycles
    for rank in sorted(members & calls.keys()):
        awaited = [w for w in verdict.waits if w.missing == {rank}]
        if len(awaited) != 1 or awaited[0].conflict:
            continue
        wait, own = awaited[0], calls[rank][1]
        call = next((wait.calls[r] for r in wait.ranks if r in wait.calls), None)
        if call is None or call.p2p:  # whether that rank will make a message's other end at all is not known
            continue
        op, other = (compatible.op_name(c.op) for c in (call, own))
        return filled(_FIRST, rank=rank, op=op, site=call.site, other=other, own=own.site)
    return ""


def _missing_advice(verdict: Verdict, calls: dict[int, tuple[Wait, Call]]) -> str:
    culprits, main = verdict.culprits, verdict.wait
    call = calls[culprits[0]][1] if culprits and culprits[0] in calls else None
    if call is not None and call.op == "new_group":
        return NEW_GROUP_ADVICE
    left_out = verdict.call
    outside = set(calls[culprits[0]][0].ranks) - verdict.incident.members if call is not None else set()
    if outside and left_out is not None and not main.p2p:
        # ranks of no cycle are there, too: it is the other call that the culprits do not make
        return filled(_LEFT_OUT, culprits=culprits, op=compatible.op_name(left_out.op), site=left_out.site)
    if call is not None and not call.op:  # of a wrapper such as DDP's, which all ranks make
        call = next(iter(main.calls.values()), None)
    what = f"{compatible.op_name(call.op)}{at(call.site)}" if call is not None and call.op else "the call"
    text = "look for a condition on the rank around {what}: all ranks it concerns must enter it, or none"
    if main.p2p:
        text = "look for the {other} {ranks} that {culprits} {culprits:has|have} left out before {what}"
    other = "send to" if main.p2p and main.key[2] == "recv" else "recv from"
    return filled(text, what=what, other=other, ranks=main.ranks, culprits=culprits)


def _batched_at_one_end(snapshot: Snapshot, verdict: Verdict) -> bool:
    """True if a rank waits for a message that its peer has issued in the other of NCCL's two communicators for it."""
    for wait in verdict.waits:
        if not wait.p2p or not wait.missing or not any(c.on_device for c in wait.calls.values()):
            continue
        group, _, direction, rank, peer, tag = wait.key
        if peer not in snapshot.ranks:
            continue
        other = in_group_communicator(tag)
        theirs = messages.count(snapshot.ranks[peer], messages.OPPOSITE[direction], rank, other, group)
        if theirs > messages.count(snapshot.ranks[rank], direction, peer, other, group):
            return True
    return False


def _other_tag(snapshot: Snapshot, calls: dict[int, tuple[Wait, Call]]) -> tuple[Call, Call] | None:
    """Return the two ends of a message if their tags differ: one that a rank waits in, and one that its peer has open.

    The peer may wait elsewhere; then neither tag has been used at the other end: a tag in use may be that of a later message.
    """
    for r, (_, call) in sorted(calls.items()):
        peer = snapshot.ranks.get(call.peer) if call.p2p and call.peer is not None else None
        if peer is None:
            continue
        for other in messages.open_to(peer, r):
            way, back = messages.direction_of(call), messages.direction_of(other)
            if way == back or other.group != call.group or other.tag == call.tag:
                continue
            new = not messages.count(snapshot.ranks[r], way, peer.rank, other.tag, call.group)
            if other is peer.blocked or (new and not messages.count(peer, back, r, call.tag, call.group)):
                return call, other
    return None
