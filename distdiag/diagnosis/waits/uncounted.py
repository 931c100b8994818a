"""Infers what hosts wait for on a backend that counts no completed operations, from what every rank has issued.

An operation that some member has not issued cannot be complete, nor can one whose calls are incompatible. So a rank's device is in
its oldest such operation, and its host waits for that while it waits for the device. Nothing is inferred for hosts that are
not known to wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Snapshot, issue_stack
from distdiag.diagnosis.waits import messages
from distdiag.diagnosis.waits.wait import call_at, conflict_at
from distdiag.terms.backends import blocks_host, may_count_messages

NEWEST = 32  # collectives of a group that are compared: a host does not run ahead of its device by more


def resolved(s: Snapshot) -> Snapshot:
    """Return the snapshot with `blocked` inferred for ranks whose host waits for its device, if no counter shows it."""
    unknown = [r for r in s.ranks.values() if _unknown(r)]
    if not unknown:
        return s
    found = {r.rank: _waiting(s, r) for r in unknown}
    changed = {q: r for q, r in found.items() if r is not None}
    return replace(s, ranks=s.ranks | changed) if changed else s


def unseen(s: Snapshot, r: RankState) -> tuple[str, ...]:
    """Return the groups whose operations may hold up the device that a rank's host waits for:
    nothing shows which it has completed, and none is known to be open.

    A member whose device is busy, or in a send that may be buffered, delays operations that all
    members have issued.
    """
    if not _unknown(r):
        return ()
    messages_of = {c.group for c in r.calls if c.on_device and c.p2p}
    found = []
    for name, group in s.groups.items():
        in_use = r.enqueued.get(name, 0) > 0 or (name in messages_of and may_count_messages(group.backend))
        if in_use and name not in r.completed and not blocks_host(group.backend) and len(group.ranks) > 1:
            found.append(name)
    return tuple(found)


def _unknown(r: RankState) -> bool:
    waits = r.host_wait == "device" and r.life in (Life.RUNNING, Life.STARTING)
    return waits and r.blocked is None and not r.queued


def _waiting(s: Snapshot, r: RankState) -> RankState | None:
    heads = sorted(_open(s, r), key=lambda c: float("inf") if c.entered_s is None else c.entered_s)
    if not heads:
        return None
    # A message may lie in a buffer: a send is what the device is in only if nothing else is.
    head = next((c for c in heads if c.op != "send"), heads[0])
    stack = r.user_stack if head.site is None else issue_stack(head.site, r.user_stack)
    return replace(r, blocked=head, queued=tuple(heads), activity="waiting", user_stack=stack, host_stack=r.user_stack)


def _open(s: Snapshot, r: RankState) -> Iterator[Call]:
    """Yield the oldest operation of each group, and every message, that this rank has issued and that cannot be complete."""
    for name, issued in r.enqueued.items():
        group = s.groups.get(name)
        if group is None or name in r.completed or issued <= 0 or blocks_host(group.backend):
            continue
        seq = _first_open(s, name, group.ranks)
        if seq <= issued:
            yield call_at(r, name, seq) or Call(op="", group=name, seq=seq, on_device=True)
    for call in r.calls:
        if call.on_device and call.p2p and call.peer is not None and call.nth is not None:
            peer = s.ranks.get(call.peer)
            if peer is not None and not messages.other_end_issued(r, peer, call, call.nth):
                yield replace(call, completed_s=None)


def _first_open(s: Snapshot, name: str, members: tuple[int, ...]) -> int:
    """Return the number of a group's first collective that cannot be complete."""
    by_all = min(s.ranks[q].enqueued.get(name, 0) if q in s.ranks else 0 for q in members)
    for seq in range(max(1, by_all - NEWEST), by_all + 1):
        if conflict_at(s, name, seq):
            return seq
    return by_all + 1
