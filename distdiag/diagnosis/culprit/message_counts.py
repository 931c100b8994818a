"""Evidence from counts of messages: a rank has sent fewer than its peers."""

from __future__ import annotations

from distdiag.diagnosis.culprit.case import Case, Testimony
from distdiag.diagnosis.model.findings import rank_list
from distdiag.diagnosis.model.snapshot import Snapshot
from distdiag.diagnosis.waits import messages
from distdiag.diagnosis.waits.wait import Wait


def fewer(case: Case) -> Testimony | None:
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
