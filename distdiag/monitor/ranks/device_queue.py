"""Find the operations that a rank's device has not completed.

The host issues operations and runs ahead; the device executes them in the order of issue. Incomplete collectives follow from
the flight recorder's counters (issued − completed per group), incomplete messages from its entries. Of collectives issued by
C++ (DDP's reducer) only the number is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call
from distdiag.monitor.ranks.decode import PageDecoder
from distdiag.monitor.ranks.follow import RankHistory
from distdiag.page.layout import GroupSlot
from distdiag.terms.backends import blocks_host

OpenMessages = Mapping[tuple[str, str, int | None], int]  # (group, send or recv, peer) -> how many are incomplete


class DeviceGroups:
    """The process groups of one rank whose collectives do not block the host."""

    def __init__(self, decoder: PageDecoder, history: RankHistory) -> None:
        self._decoder, self._history = decoder, history

    def _slots(self) -> list[GroupSlot]:
        return self._decoder.page.groups[: self._decoder.header.n_groups]

    def _backend(self, slot: GroupSlot) -> str:
        return self._decoder.text(slot.backend)

    @property
    def groups(self) -> tuple[int, ...]:
        """Return the slots of those that exist, by backend or by their calls so far."""
        slots = self._slots()
        unknown = not all(map(self._backend, slots))
        seen = {call.group for call in self._history.calls if call.on_device} if unknown else set()
        return tuple(
            i
            for i, slot in enumerate(slots)
            if not slot.destroyed
            and (not blocks_host(self._backend(slot)) or (unknown and self._decoder.group_key(i) in seen))
        )

    def used(self) -> bool:
        """True if this rank has or had such a group: its steps then have no measured waits."""
        return not all(blocks_host(self._backend(slot)) for slot in self._slots()) or any(
            call.on_device for call in self._history.calls
        )

    def has_open(self) -> bool:
        """True if the device may have an operation in flight: by the counters, or because of messages, which have no counter."""
        page = self._decoder.page
        return any((g := page.groups[i]).completed < g.enqueued or page.header.n_peers for i in self.groups)

    def known(self) -> frozenset[tuple[str, int]]:
        """Return the collectives that Python issued, as (torch's name of the group, the flight recorder's number)."""
        page, text = self._decoder.page, self._decoder.text
        slots = {self._decoder.group_key(i): page.groups[i] for i in self.groups}
        return frozenset(
            (text(slot.name), call.seq + slot.offset)
            for call in self._history.calls
            if call.seq is not None and (slot := slots.get(call.group)) is not None
        )


def incomplete(
    calls: tuple[Call, ...], completed: Mapping[str, int], open_messages: OpenMessages | None
) -> tuple[Call, ...]:
    """Return the calls (oldest first); those on a device are complete only by the counters and the open messages."""
    left = dict(open_messages or {})
    out = []
    for c in reversed(calls):
        if c.on_device and c.completed_s is not None:
            if c.p2p:
                key = (c.group, c.op, c.peer)
                is_open = left.get(key, 0) > 0
                left[key] = left.get(key, 0) - 1
            else:
                is_open = c.seq is not None and c.seq > completed.get(c.group, c.seq)
            if is_open:
                c = replace(c, completed_s=None)
        out.append(c)
    return tuple(reversed(out))


def heads(
    calls: tuple[Call, ...],
    groups: Iterable[str],
    enqueued: Mapping[str, int],
    completed: Mapping[str, int],
    issued_in_cpp: Mapping[str, Call],
) -> tuple[Call, ...]:
    """Return the oldest incomplete operation of each group and each communicator of messages, in the order of issue.

    Args:
        calls: The rank's calls, oldest first, from `incomplete`.
        groups: Groups whose collectives do not block the host.
        issued_in_cpp: By group: its oldest incomplete collective, if C++ issued it.
    """
    found: list[Call] = []
    known: dict[tuple[str, int | None], Call] = {}
    messages: dict[tuple[str, int | None], Call] = {}
    for c in calls:
        if not c.on_device or c.completed_s is not None:
            continue
        if c.p2p:
            # a communicator executes them in order; a tag below 0: that of the whole group
            messages.setdefault((c.group, None if c.tag < 0 else c.peer), c)
        else:
            known.setdefault((c.group, c.seq), c)
    for group in groups:
        done = completed.get(group)
        if done is not None and done < enqueued.get(group, 0):
            head = known.get((group, done + 1)) or issued_in_cpp.get(group)
            found.append(head or Call(op="", group=group, seq=done + 1, on_device=True))
    found += messages.values()
    # A collective from C++ without a time is sorted last: it proves no order.
    return tuple(sorted(found, key=lambda c: float("inf") if c.entered_s is None else c.entered_s))


def waited_for(queued: tuple[Call, ...]) -> Call | None:
    """Return the operation that a host waits for while it waits for its device; None if that is not known.

    That is the first operation that the stream depends on: a synchronous one, one whose `wait()` returned, or one issued by C++.
    If the only operation is asynchronous and has no `wait()`, it is that one.
    """
    for c in queued:
        in_call = not c.asynchronous and not c.p2p  # the host is still in the call: a barrier waits inside
        if c.left_s is not None or c.entered_s is None or in_call:
            return c
    return queued[0] if len(queued) == 1 else None
