"""Evidence from counts of messages: a rank has sent fewer than its peers, or a message to some of its receivers only."""

from __future__ import annotations

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Call, RankState, Snapshot
from distdiag.diagnosis.text.phrases import at
from distdiag.diagnosis.waits import messages
from distdiag.diagnosis.waits.wait import Wait


def accuse(case: Case) -> Testimony | None:
    """Accuse a rank that left one receiver out, else one that has sent fewer messages than its peers."""
    return _left_out(case) or _fewer(case)


def _left_out(case: Case) -> Testimony | None:
    """Accuse a rank that has sent a message at some site to one rank, but not to another which waits for its own at the same recv."""
    found: dict[int, tuple[int, Call, Call]] = {}
    for wait in case.incident.waits:
        call = wait.calls.get(wait.ranks[0]) if wait.p2p and len(wait.ranks) == 1 else None
        if call is None or call.peer is None or wait.missing != {call.peer} or messages.direction_of(call) != "recv":
            continue
        receiver, sender = wait.ranks[0], case.states.get(call.peer)
        for other in case.states.values() if sender is not None else ():
            served = _newest_recv(other, call) if other.rank != receiver else None
            sent = (
                messages.other_end(sender, other.rank, "recv", served, served.nth or 0) if served and sender else None
            )
            if sent is None or sent.site is None or sender is None or sender.sites.get(sent.site.key, 0) > 1:
                continue
            if not any(c.site == sent.site and c.peer == receiver for c in sender.calls):
                found.setdefault(sender.rank, (receiver, call, sent))
    if len(found) != 1:
        return None
    ((rank, (receiver, call, sent)),) = found.items()
    there, here = f"send{at(sent.site)}", f"recv{at(call.site)}"
    return Testimony(
        ranks=(rank,),
        text=f"; rank {rank} made the {there} for rank {sent.peer} only, and rank {receiver}'s {here} has none",
        advice=f"let rank {rank} make the {there} for rank {receiver}, too: every rank that makes the {here} needs a message",
    )


def _newest_recv(state: RankState, call: Call) -> Call | None:
    """Return its newest recv from the same rank at the same site, if that is complete."""
    same = (c for c in reversed(state.calls) if c.p2p and messages.direction_of(c) == "recv" and c.site == call.site)
    newest = next((c for c in same if (c.peer, c.group, c.tag) == (call.peer, call.group, call.tag)), None)
    return newest if newest is not None and newest.completed_s is not None and newest.site is not None else None


def _fewer(case: Case) -> Testimony | None:
    """Accuse a rank that has sent fewer messages than all that have issued a collective which it waits in, if another rank waits
    for one of its messages. If a message of any of them would do, the others must have sent equally many, at least two of them.
    """
    snapshot, waits = case.snapshot, case.incident.waits
    for wait in waits:
        if not wait.p2p or len(wait.ranks) != 1 or not (wait.any_of or len(wait.missing) == 1):
            continue
        (m,) = wait.ranks
        call = wait.calls.get(m)
        if call is None or messages.direction_of(call) != "recv":
            continue
        for p in sorted(wait.missing):
            together = next((_arrived(snapshot, other) for other in waits if not other.p2p and p in other.ranks), [])
            sent = {q: messages.count(case.states[q], "send", m, call.tag, call.group) for q in together if q != m}
            others = [n for q, n in sent.items() if q != p]
            equal = not wait.any_of or (len(others) > 1 and len(set(others)) == 1)
            if others and equal and sent.get(p, 0) < min(others) and 2 * sent[p] > max(others):
                return Testimony(ranks=(p,), text=f"; {rank_list([p])} has sent fewer messages than the others")
    return None


def _arrived(snapshot: Snapshot, wait: Wait) -> list[int]:
    """Return the ranks that have issued a collective, whether or not their hosts are known to wait for it yet."""
    group = snapshot.groups.get(wait.group)
    members = group.ranks if group is not None else tuple(wait.ranks)
    return sorted({*wait.ranks, *(q for q in members if q in snapshot.ranks and q not in wait.missing)})
