"""Evidence from messages that were not sent: to one receiver, in one round, or fewer than the peers sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from distdiag.diagnosis.culprit import callers
from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.culprit.paths import conditions_between, returns_before
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState, Snapshot
from distdiag.diagnosis.text.conditions import decision_advice
from distdiag.diagnosis.text.phrases import at, op_at
from distdiag.diagnosis.waits import compatible, messages
from distdiag.diagnosis.waits.wait import Wait, calls_until

RING = 3  # waits of a cycle, so that at least two others show what is usual
ROUNDS = 8  # with the send, for each without it: then it was due in every round


def accuse(case: Case) -> Testimony | None:
    """Accuse a rank that left out a receiver or a message, else one that has sent fewer than its peers, or none in a ring."""
    return _left_out(case) or _one_round(case) or _short_batch(case) or _never(case) or _fewer(case)


def explain(case: Case, ranks: Sequence[int]) -> Testimony | None:
    """Return the message that one of these ranks left out in one round."""
    found = (_one_round(case) or _short_batch(case)) if ranks else None
    return found if found is not None and set(found.ranks) <= set(ranks) else None


def _messages(case: Case, *directions: str) -> Iterator[tuple[Wait, int, Call]]:
    """Yield (wait, its rank, the rank's call) of every wait in a message, of these directions."""
    for wait in case.incident.waits:
        for rank in wait.ranks if wait.p2p else ():
            if messages.direction_of(wait.calls[rank]) in (directions or messages.OPPOSITE):
                yield wait, rank, wait.calls[rank]


def _unserved(case: Case) -> Iterator[tuple[int, Call, RankState]]:
    """Yield (receiver, its call, the sender) of every wait for a message of one rank that it has not sent."""
    for wait, receiver, call in _messages(case, "recv"):
        sender = case.states.get(-1 if call.peer is None else call.peer)
        if sender is not None and wait.missing:
            yield receiver, call, sender


def _one_round(case: Case) -> Testimony | None:
    """Accuse a rank that left out a send in one round, if the receiver waits for a message of this rank.

    It went from the call before the send to the call after it; in all other rounds the send was between them.
    """
    waiting = ((receiver, sender, _omitted(sender, receiver, call)) for receiver, call, sender in _unserved(case))
    found = {sender.rank: (receiver, *omitted) for receiver, sender, omitted in waiting if omitted is not None}
    if len(found) != 1:
        return None
    ((rank, (receiver, before, send, times, rounds, newest)),) = found.items()
    mine, theirs = (callers.stack_at(call.site, case.states[rank], case.source) for call in (before, send))
    return Testimony(
        ranks=(rank,),
        head=f"rank {rank} left out its {op_at(send)} to rank {receiver}",
        text=f"; {'in its newest calls ' if newest else ''}it did so {_often(times)} after {compatible.op_name(before.op)}"
        f"{at(before.site)}, and made that send {_often(rounds)}",
        conditions=tuple(conditions_between(mine, theirs, case.source)),
        advice=f"send rank {receiver} a message in every round{at(send.site)}, or tell it how many follow: it expects one for each",
    )


def _omitted(sender: RankState, receiver: int, call: Call) -> tuple[Call, Call, int, int, bool] | None:
    """Return (call before, send, rounds without the send, rounds with it, True if older rounds are not counted), of the newest send.

    Rounds longer ago than the calls are known count by the sites' totals, if each of the two lines makes one call only.
    """
    calls = calls_until(sender, sender.blocked)
    send = messages.other_end(sender, receiver, call)
    if send is None or send.site is None:
        return None
    keys, due = [_key(c) for c in calls], _key(send)
    pairs = list(itertools.pairwise(keys))
    around = {(a, c) for (a, b), (_, c) in itertools.pairwise(pairs) if b == due}
    if any(due in pair for pair in around):
        return None
    without, rounds = [a for a, c in pairs if (a, c) in around], keys[1:].count(due)
    times, before = len(without), without[-1] if without else next((a for a, _ in around), None)
    first = next((c for c in calls if _key(c) == before), send)
    made_at = {c.site.key: _key(c) for c in (first, send) if c.site is not None}
    after = {b for a, b in pairs if a == before} - {due}
    alternate = {a for a, _ in around} == {before} and all((before, b) in around for b in after)
    one_call_each = {_key(c) for c in calls if c.site and c.site.key in made_at} == set(made_at.values())
    totals = alternate and len(made_at) == 2 and one_call_each and made_at.keys() <= sender.sites.keys()
    if totals:
        made, rounds = (sender.sites.get(site, 0) for site in made_at)
        times = max(times, made - rounds - (keys[-1] == before))
    lacking = (call.nth or 0) - messages.count(sender, "send", receiver, call.tag, call.group)
    newest = not totals and sum(sender.sites.values()) > len(calls)
    return (first, send, times, rounds, newest) if lacking <= times and 0 < times * ROUNDS <= rounds else None


def _key(call: Call) -> tuple[object, ...]:
    return compatible.op_name(call.op), call.group, call.peer, call.site


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times:,} times"


def _short_batch(case: Case) -> Testimony | None:
    """Accuse the rank whose newest batch lacks the message that another one waits for, where each batch before had it.

    Dumps show batches: their messages have one time.
    """
    for wait, waiting, call in _messages(case):
        rank, due = next(iter(wait.missing), -1), (messages.OPPOSITE[messages.direction_of(call)], waiting)
        made = [c for c in case.states[rank].calls if c.p2p and c.group == call.group] if rank in case.states else []
        batches: dict[float | None, set[tuple[str, int | None]]] = {}
        for c in made:
            if c.site == made[-1].site:
                batches.setdefault(c.entered_s, set()).add((messages.direction_of(c), c.peer))
        *before, newest = batches.values() or [{due}]
        if len(before) < ROUNDS or due in newest or not all(due in batch and len(batch) > 1 for batch in before):
            continue
        there = f"{op_at(replace(made[-1], op=due[0]))} {'to' if due[0] == 'send' else 'from'} rank {waiting}"
        return Testimony(
            ranks=(rank,),
            head=f"rank {rank} left out its {there}",
            text=f"; the newest batch of rank {rank}{at(made[-1].site)} lacks it, where each of the {len(before)} before had it",
            advice=f"find what led rank {rank} past its {there}, as a condition on the neighbour: both ranks must exchange in each round",
        )
    return None


def _left_out(case: Case) -> Testimony | None:
    """Accuse a rank that has sent a message to one rank, but not to another that waits at the same recv."""
    found: dict[int, tuple[int, Call, Call]] = {}
    for receiver, call, sender in _unserved(case):
        for other in case.states.values():
            served = _newest_recv(other, call) if other.rank != receiver else None
            sent = messages.other_end(sender, other.rank, served, served.nth or 0) if served is not None else None
            once = sent is not None and sent.site is not None and sender.sites.get(sent.site.key, 0) <= 1
            if sent is not None and once and not any((c.site, c.peer) == (sent.site, receiver) for c in sender.calls):
                found.setdefault(sender.rank, (receiver, call, sent))
    if len(found) != 1:
        return None
    ((rank, (receiver, call, sent)),) = found.items()
    there, here = f"send{at(sent.site)}", f"recv{at(call.site)}"
    return Testimony(
        ranks=(rank,),
        head=f"rank {rank} made the {there} for rank {sent.peer} only",
        text=f"; rank {receiver}'s {here} has none",
        advice=f"let rank {rank} make the {there} for rank {receiver}, too: every rank that makes the {here} needs a message",
    )


def _newest_recv(state: RankState, call: Call) -> Call | None:
    """Return its newest recv from the same rank at the same site, if that is complete."""
    same = (c for c in reversed(state.calls) if c.p2p and messages.direction_of(c) == "recv" and c.site == call.site)
    newest = next((c for c in same if (c.peer, c.group, c.tag) == (call.peer, call.group, call.tag)), None)
    return newest if newest is not None and newest.completed_s is not None and newest.site is not None else None


def _never(case: Case) -> Testimony | None:
    """Accuse the one rank of a ring that has never sent to its receiver, where the others send from one line."""
    ring = {receiver: (call, sender) for receiver, call, sender in _unserved(case)}
    sends = {receiver: messages.other_end(sender, receiver, call) for receiver, (call, sender) in ring.items()}
    silent = [receiver for receiver, send in sends.items() if send is None]
    lines = {send.site for send in sends.values() if send is not None}
    if not RING <= len(ring) == len(case.incident.waits) or len(silent) != 1 or len(lines) != 1:
        return None
    (receiver,), (site,) = silent, lines
    call, sender = ring[receiver]
    if site is None or site.key in sender.sites or site.key not in case.states[receiver].sites:
        return None
    if messages.count(sender, "send", receiver, call.tag, call.group):
        return None
    there, here = f"send{at(site)}", f"recv{at(call.site)}"
    return Testimony(
        ranks=(sender.rank,),
        text=f"; rank {sender.rank} has never made the {there}, which serves the {here} of the other ranks",
        advice=f"let rank {sender.rank} make the {there} for rank {receiver}, too, or let rank {receiver} expect nothing of it",
    )


def _fewer(case: Case) -> Testimony | None:
    """Accuse a rank that another one waits for, if it has sent fewer messages than all others in its collective.

    If a message of any of them would do, the others must have sent equally many, at least two of them.
    """
    snapshot, waits = case.snapshot, case.incident.waits
    for wait, m, call in _messages(case, "recv"):
        for p in sorted(wait.missing) if wait.any_of or len(wait.missing) == 1 else ():
            together = next((_arrived(snapshot, other) for other in waits if not other.p2p and p in other.ranks), [])
            sent = {q: messages.count(case.states[q], "send", m, call.tag, call.group) for q in together if q != m}
            others = [n for q, n in sent.items() if q != p]
            equal = not wait.any_of or (len(others) > 1 and len(set(others)) == 1)
            if others and equal and sent.get(p, 0) < min(others) and 2 * sent[p] > max(others):
                return _last_of_others(case, p, m, [q for q in sent if q != p])
    return None


def _last_of_others(case: Case, rank: int, receiver: int, others: Sequence[int]) -> Testimony:
    """Return that a rank has sent less than others, and the line of their last message if it alone has never been there."""
    text = f"; {rank_list([rank])} has sent fewer messages than the others"
    sends = [
        next((c for c in reversed(case.states[q].calls) if c.peer == receiver and messages.direction_of(c) == "send"), None)
        for q in others
    ]  # fmt: skip
    send, places = sends[0], {c.site.key if c is not None and c.site is not None else "" for c in sends}
    if send is None or send.site is None or len(places) > 1 or places & case.states[rank].sites.keys():
        return Testimony(ranks=(rank,), text=text)
    found = returns_before(send.site, case.source)
    return Testimony(
        ranks=(rank,), text=text, head=f"rank {rank} left out its {op_at(send)} to rank {receiver}", conditions=tuple(found),
        advice=decision_advice(found[0], (rank,), send) if len(found) == 1 else f"find what led rank {rank} past its {op_at(send)}",
    )  # fmt: skip


def _arrived(snapshot: Snapshot, wait: Wait) -> list[int]:
    """Return the ranks that have issued a collective, whether or not their hosts are known to wait for it yet."""
    group = snapshot.groups.get(wait.group)
    members = group.ranks if group is not None else tuple(wait.ranks)
    return sorted({*wait.ranks, *(q for q in members if q in snapshot.ranks and q not in wait.missing)})
