"""Process groups of this rank: their members, and the newest issued and completed collective of each.

A sequence number is the position of a collective in its group, from 1; it is equal on all members. gloo's own numbers, which its
flight recorder shows, also count point-to-point calls, and ranks make different numbers of those. So each such call's effect on
the counter is measured and subtracted.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d as dist

from distdiag.page.layout import GROUPS, GroupSlot
from distdiag.recorder import state
from distdiag.recorder.frames import backend_files, backend_paths
from distdiag.recorder.hooks.flight_recorders import (
    OWN,
    Hook,
    devices,
    hook_of,
    implementations,
    of_torch,
    of_world,
    own_status,
)
from distdiag.recorder.state import guarded
from distdiag.terms.backends import blocks_host, may_count_messages
from distdiag.terms.ranks import fold_ranks
from distdiag.unpatched import Lock

UNFOLLOWED_KEPT = 16
OFFSETS_KEPT = 16  # offsets kept; the flight recorder's newest numbers are only a few collectives old


@dataclass(slots=True)
class Batch:
    """Operations between `_start_coalescing` and `_end_coalescing`: one operation of the device, with one number."""

    begun_ns: int
    calls: list[int] = field(default_factory=list)
    seq: int = 0  # number shared by its collectives


class Numbering:
    """Translates another counter of a group's operations, which counts its messages, too, into the number of collectives."""

    def __init__(self) -> None:
        self.offset = 0  # the counter minus the number of collectives
        self._segments = deque([(0, 0)], OFFSETS_KEPT)  # (collectives issued before, offset from then on)

    def shift(self, issued: int, offset: int) -> None:
        """Use this offset of the counter from the next collective on; `issued` precede it."""
        self.offset = offset
        if self._segments[-1][0] == issued:
            self._segments[-1] = issued, offset
        else:
            self._segments.append((issued, offset))

    def number(self, raw: int) -> int:
        """Return how many collectives of the group were issued up to the counter's value `raw`."""
        if raw <= 0:
            return raw
        offset, most = 0, raw + abs(self.offset)
        for issued, offset in reversed(self._segments):
            if raw - offset >= issued:
                break
            most = issued  # of the segment before
        return min(raw - offset, most)


class Group:
    def __init__(self, pg: Any, slot: GroupSlot, slot_index: int, members: list[int]) -> None:
        self.pg, self.slot, self.slot_index = pg, slot, slot_index
        # The backend's counter of collectives. None: it has none, and those that Python issues are counted.
        self.counter = _counter(pg)
        self.members = members
        self.to_global = dict(enumerate(members))
        self.numbering = Numbering()  # of the backend's counter, and of a flight recorder that the backend writes
        self.hook: Hook | None = None  # records the group for a backend without a flight recorder
        self.recorded = Numbering()  # of the operations that the hook has recorded
        self.recorded_messages = 0
        self.may_count_messages = True  # in its counter of collectives
        self.backend = ""  # `gloo`, `cpu:gloo,cuda:nccl`
        self.implementations: tuple[str, ...] = ()  # the names by which torch calls the same: `nccl2`
        self.on_device = False  # its collectives do not block the host
        self.coalescing: Batch | None = None  # between _start_coalescing and _end_coalescing
        # Existing communicators: None for the whole group, else the peer of a pair. Only for devices.
        self.connected: set[int | None] = set()
        self.open_messages = 0  # point-to-point calls that have not returned: the counter may be ahead
        self.begun_messages = 0
        self.issued = 0  # collectives issued when the oldest open message began, or since; never written by the pulse

    @property
    def offset(self) -> int:
        """The backend's counter minus the number of collectives."""
        return self.numbering.offset

    def shift(self, offset: int) -> None:
        """Use this offset of the backend's counter from the next collective on."""
        if self.hook is None:  # the flight recorder's numbers are the backend's
            self.slot.offset = offset
        self.numbering.shift(self.slot.enqueued, offset)

    def message_begins(self) -> None:
        """Note that a point-to-point call begins: the counter minus the collectives issued so far will be the offset."""
        if not self.open_messages and self.counter is not None:  # DDP may have issued collectives since the last beat
            self.issued = self.slot.enqueued = self.counter() - self.offset
        self.begun_messages += 1
        self.open_messages += 1

    def message_ends(self) -> None:
        self.open_messages -= 1
        if not self.open_messages and self.counter is not None:
            offset = self.counter() - self.issued
            if offset != self.offset:
                self.slot.enqueued = self.issued
                self.shift(offset)

    def message_is_recorded(self) -> None:
        """Note that the hook is about to record a message, among the collectives."""
        issued = self.slot.enqueued if self.counter is None else self.counter() - self.offset
        self.recorded_messages += 1
        self.recorded.shift(issued, self.recorded.offset + 1)

    def by_hook(self, counters: tuple[int, int], at_least: int, at_most: int) -> tuple[int, int] | None:
        """Return (newest issued, newest completed) by the hook's counters; None if that is not known.

        What a CUDA graph captures takes a number and is not recorded. So numbers that are missing while nothing is issued
        (`at_least` and `at_most`: before and after the counters were read) are a change of the offset.
        """
        issued, completed = counters
        if at_least == at_most and self.recorded.number(issued) < at_least and not self.open_messages:
            self.recorded.shift(at_least, issued - at_least)
            self.slot.offset = self.recorded.offset - self.recorded_messages
        newest = self.recorded.number(issued)
        if not at_least <= newest <= at_most + 1:  # one may be recorded before the backend counts it
            return None
        return newest, -1 if completed < 0 else self.recorded.number(completed)


class Groups:
    def __init__(self, recorder: state.Recorder) -> None:
        self.recorder = recorder
        self.header = recorder.header
        self.page = recorder.page
        self.groups: dict[int, Group] = {}  # by id of the ProcessGroup object
        self.generation = 0
        self.lost = False  # the default group has other members than torch's records of later groups assume
        self.unfollowed: dict[int, Any] = {}  # by id: groups that are not registered again
        self._lock = Lock()

    def group(self, pg: Any) -> Group | None:
        """Return the group of a ProcessGroup; it is registered when first seen."""
        g = self.groups.get(id(pg))
        if g is None or g.pg is not pg:
            g = self._register(pg)
        return g

    def _own_code(self, pg: Any, backend: str) -> None:
        """Take the Python files of a group's backend out of the user's code, here and in the stacks that the monitor reads."""
        before = backend_paths()
        creator = getattr(getattr(dist.Backend, "_plugins", {}).get(backend.upper()), "creator_fn", None)
        for what in (*type(pg).__mro__, creator):
            module = sys.modules.get(getattr(what, "__module__", None) or "")
            file = getattr(module, "__file__", None)
            if module is not None and file and file.endswith(".py") and module.__name__ != "__main__":
                backend_files(file, module.__package__)
        if (found := backend_paths()) != before:
            self.recorder.note(backend_files=found)

    @guarded
    def unfollow(self, pg: Any, what: str, frame: FrameType, g: Group | None = None) -> None:
        """Note an operation on a group after which its waits cannot be judged; all but `new_window` end its recording, too.

        `g` is the group as it was recorded, if it no longer is.
        """
        g = g or self.groups.get(id(pg))
        if what != "new_window":
            self.unfollowed[id(pg)] = pg
            self.groups.pop(id(pg), None)
            if g is not None:
                g.slot.destroyed = 1
        known = self.recorder.facts.get("unfollowed", [])
        new = [what, g.slot_index if g is not None else -1, self.recorder.user_site(frame)]
        if new not in known and len(known) < UNFOLLOWED_KEPT:
            self.recorder.note(unfollowed=[*known, new])

    def _register(self, pg: Any) -> Group | None:
        if self.lost or self.unfollowed.get(id(pg)) is pg:
            return None
        with self._lock:
            n = self.header.n_groups
            if n >= GROUPS:
                self.header.dropped += 1
                return None
            members = _members(pg)
            name = of_world("pg_names", {}).get(pg) or of_torch(pg, "group_name", f"group {n}")
            slot = self.page.page.groups[n]
            slot.name = self.page.text(str(name))
            slot.description = self.page.text(str(of_torch(pg, "group_desc") or ""))
            try:
                backend = str(dist.get_backend(pg))
            except (ValueError, RuntimeError, KeyError, AssertionError):
                backend = ""
            slot.backend = self.page.text(backend)
            self._own_code(pg, backend)
            slot.ranks = self.page.text(fold_ranks(list(members)))
            slot.generation = max(self.generation, 1)
            slot.completed = -1
            slot.flight_recorder_id = -1
            g = Group(pg, slot, n, list(members))
            g.backend = backend
            g.on_device = not blocks_host(backend)
            g.may_count_messages = may_count_messages(backend)
            g.implementations = implementations(pg)
            g.hook = hook_of(pg, g.implementations)
            self._note_recorders(g)
            self._calibrate(g)
            self.groups[id(pg)] = g
            self.header.n_groups = n + 1
            return g

    def _note_recorders(self, g: Group) -> None:
        """Tell the monitor which flight recorders to ask: those of backends, and those that hooks write, with what they know."""
        hooked = dict(self.recorder.facts.get("hooked_recorders", {}))
        if g.hook is not None:
            hooked[g.hook.backend] = g.hook.reports_completion
        known = {"own_recorders": OWN, "hooked_recorders": hooked}
        if any(self.recorder.facts.get(key) != value for key, value in known.items()):
            self.recorder.note(**known)

    def _calibrate(self, g: Group) -> None:
        """Set the offset if the backend's counter and the flight recorder's already differ (the recorder attached late)."""
        count = g.counter() if g.counter is not None else 0
        if count <= 0 or g.hook is not None:
            return
        status = own_status()
        known = [int(s["last_enqueued_collective"]) for s in status.values()]
        if known and count not in known:
            below = [k for k in known if 0 <= k < count]
            if len(known) == 1 and below:
                g.shift(count - below[0])

    @guarded
    def refresh_groups(self) -> None:
        """Write the newest issued and completed collective of every group; called by the pulse."""
        groups = list(self.groups.values())
        begun = {id(g): g.begun_messages for g in groups}
        before = {id(g): issued for g in groups if (issued := _issued(g)) is not None}
        status = own_status()
        for g in groups:
            if g.hook is not None:
                self._refresh_hooked(g)
                continue
            issued = _issued(g)
            if issued is None or id(g) not in before:
                continue
            fr = self._recorder_entry(g, status, before[id(g)], issued)
            if fr is not None:
                g.slot.enqueued = g.numbering.number(int(fr["last_enqueued_collective"]))
                g.slot.completed = g.numbering.number(int(fr["last_completed_collective"]))
            # a message that began meanwhile may have put the counter ahead
            elif not g.open_messages and g.begun_messages == begun[id(g)]:
                g.slot.enqueued = issued
                g.slot.completed = -1

    @staticmethod
    def _refresh_hooked(g: Group) -> None:
        """Write the counters of a group that a hook of torch records."""
        before = _issued(g)
        counters = g.hook.counters() if g.hook is not None else None
        after = _issued(g)
        if before is None or after is None:
            return
        found = g.by_hook(counters, before, after) if counters is not None else None
        if found is not None:
            g.slot.enqueued, g.slot.completed = found
        elif not g.open_messages:
            g.slot.enqueued, g.slot.completed = before, -1

    def _recorder_entry(self, g: Group, status: dict[str, Any], at_least: int, at_most: int) -> dict[str, Any] | None:
        """Return the flight recorder's counters of a group, which the recorder identifies by other numbers.

        The counts identify the group: groups with equal counts can be distinguished once one of them is ahead. The main thread
        continues meanwhile, so the counts must be between the group's own before and after.
        """

        def count(counters: dict[str, Any]) -> int:
            return g.numbering.number(int(counters["last_enqueued_collective"]))

        known = status.get(str(g.slot.flight_recorder_id))
        if g.open_messages or (known is not None and at_least <= count(known) <= at_most):
            return known
        if known is not None and count(known) == at_least - 1:
            return None  # a running call is not recorded yet: NCCL's first call connects before it is recorded
        taken = {str(other.slot.flight_recorder_id) for other in self.groups.values() if other is not g}
        found = [k for k, counters in status.items() if k not in taken and at_least <= count(counters) <= at_most]
        only = found[0] if len(found) == 1 and at_most > 0 else None
        g.slot.flight_recorder_id = -1 if only is None else int(only)
        return None if only is None else status[only]


def _members(pg: Any) -> list[int]:
    ranks = of_world("pg_group_ranks", {}).get(pg)
    if ranks:
        return sorted(ranks, key=lambda r: ranks[r])
    try:
        return list(dist.get_process_group_ranks(pg))
    except (KeyError, RuntimeError, ValueError, AttributeError):  # torch does not know it
        return list(range(pg.size()))


def _issued(g: Group) -> int | None:
    """Return the number of collectives issued in a group so far; None if the group no longer exists."""
    if g.slot.destroyed:
        return None
    if g.counter is None:
        return g.slot.enqueued
    try:
        return g.counter() - g.offset
    except RuntimeError:  # the group was shut down between two beats
        return None


def _counter(pg: Any) -> Callable[[], int] | None:
    """Return a function that returns a group's collective count; None if its backend has no sequence numbers.

    torch only queries backends that it knows by name; others are queried directly.
    """
    counters = [of_torch(pg, "_get_sequence_number_for_group")]
    backend = of_torch(pg, "_get_backend")
    counters += [lambda d=device: backend(d)._get_sequence_number_for_group() for device in devices(pg)]
    for counter in counters:
        try:
            counter()
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            continue
        return counter
    return None
