"""Find the operation that a rank's host waits in, from its page, its flight record and its native frames."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.monitor.evidence.ask import FlightRecord, wall_offset_ns
from distdiag.monitor.evidence.native import HostWait
from distdiag.monitor.ranks import device_queue
from distdiag.monitor.ranks.follow import PageView
from distdiag.page.layout import BACKEND_FRAME, BARRIER_PEER, CALLS, Blocked, Header, Page
from distdiag.terms.backends import blocks_host
from distdiag.terms.ranks import unfold_ranks

# innermost Python frames of calls in which C++ waits for a collective
_CPP_WAITS = ("_functional_collectives.", "_ops.")


@dataclass
class RankWaits(PageView):
    """The operation that one rank waits in, on the host or for its device."""

    # by group: number and time of the oldest open collective, if C++ issued it
    issued_s: dict[int, tuple[int, float]] = field(default_factory=dict)

    # -- on the host --------------------------------------------------------------------------------

    def _counters(self, page: Page, record: FlightRecord | None) -> tuple[dict[str, int], dict[str, int]]:
        """Return (newest collective issued, newest completed), by group; the flight record's numbers if they are newer."""
        enqueued: dict[str, int] = dict(self.group_calls)
        completed: dict[str, int] = {}
        for generation in range(1, page.header.initialised + 1):
            enqueued[f"init_process_group {generation}"] = 1
        for i in range(page.header.n_groups):
            slot = page.groups[i]
            key = self.group_key(page, i)
            enqueued[key] = slot.enqueued
            if slot.completed >= 0:
                completed[key] = slot.completed
            name = self.text(slot.name)
            if record is None or slot.destroyed:
                continue
            if name in record.hooked:
                done = record.completed.get(name)
                completed[key] = slot.enqueued if done is None else done - slot.offset
            elif name in record.completed and not slot.offset:  # with one, the flight recorder numbers them differently
                completed[key] = record.completed[name]
                enqueued[key] = max(slot.enqueued, record.enqueued[name])
                if record.enqueued[name] == record.completed[name] and self._captured(key, record.completed[name]):
                    enqueued[key] = record.completed[name]
        for i in range(page.header.n_peers):
            slot = page.peers[i]
            if slot.peer == BARRIER_PEER:
                enqueued[f"{self.group_key(page, slot.group)} (monitored_barrier)"] = slot.count
        return enqueued, completed

    def _captured(self, group: str, recorded: int) -> bool:
        """True if a graph captured all calls after number `recorded`: they have returned and are not in the flight record.

        A captured collective takes a number and is never enqueued.
        """
        missing = [c for c in self.calls if c.group == group and c.seq is not None and c.seq > recorded]
        return bool(missing) and all(c.on_device and c.left_s is not None for c in missing)

    def _blocked(
        self, page: Page, idle: bool | None, enqueued: dict[str, int], completed: dict[str, int], record: FlightRecord | None
    ) -> Call | None:  # fmt: skip
        """Return the operation that the main thread waits in, by the page."""
        h = page.header
        site = self.site(h.blocked_site)
        since = self.s(h.blocked_since_ns)
        if h.blocked in (Blocked.WAIT, Blocked.GROUP):
            rec = page.calls[(h.blocked_at - 1) % CALLS]
            if rec.number != h.blocked_at or rec.left_ns:
                return None
            call = self._call(page, rec)
            return replace(call, site=site or call.site, entered_s=since)
        if not idle:
            return None
        if h.blocked == Blocked.NO and self.in_cpp_wait():
            return self._functional(page, enqueued, completed, record)
        if h.blocked != Blocked.DDP:
            return None
        if h.counted_ns < h.blocked_since_ns:
            return None  # its counters are older than its wait
        return self._open_call(page, h.blocked_at, enqueued, completed, record, site, since)

    def in_backend(self) -> str:
        """Return the backend's Python function that the main thread is in; "" if it is in none, or has moved since the sample."""
        assert self.page is not None
        h, since_s = self.page.header, self.still_since_s
        name = self.text(h.raw_innermost)
        if not name.startswith(BACKEND_FRAME) or since_s is None or (self.s(h.stack_ns) or 0.0) < since_s:
            return ""
        return name.removeprefix(BACKEND_FRAME)

    def in_cpp_wait(self) -> bool:
        """True if the last sample of the main thread is in torch's Python code that calls C++ collectives."""
        assert self.page is not None
        return self.text(self.page.header.raw_innermost).startswith(_CPP_WAITS)

    def _functional(
        self, page: Page, enqueued: dict[str, int], completed: dict[str, int], record: FlightRecord | None
    ) -> Call | None:
        """Return the collective that a rank waits for inside C++ (functional collectives, DTensor, compiled code).

        No hook sees that wait. It is known if the main thread sleeps in torch's call and exactly one group has an open
        collective.
        """
        h = page.header
        if self.still_since_s is None or h.stack_ns / 1e9 < self.still_since_s + self.start_ns / 1e9:
            return None  # its stack is older than its last progress
        if h.counted_ns < h.stack_ns:
            return None  # its counters are older than its stack
        stack = self.stack(h)
        site = stack[0] if stack else None
        found = [
            call
            for i in range(h.n_groups)
            if not page.groups[i].destroyed
            and (call := self._open_call(page, i, enqueued, completed, record, site, self.still_since_s)) is not None
        ]
        return found[0] if len(found) == 1 else None

    def _open_call(
        self, page: Page, group: int, enqueued: dict[str, int], completed: dict[str, int],
        record: FlightRecord | None, site: Site | None, since: float | None,
    ) -> Call | None:  # fmt: skip
        """Return the oldest collective of a group that was issued and is not completed, by the flight recorder's counters."""
        key = self.group_key(page, group)
        done = completed.get(key)
        if done is None or done >= enqueued.get(key, 0):
            return None
        entry = None
        if record is not None and group < page.header.n_groups:
            slot = page.groups[group]
            entry = record.entries.get((self.text(slot.name), done + 1 + slot.offset))
        seen = next((c for c in reversed(self.calls) if (c.group, c.seq) == (key, done + 1) and not c.p2p), None)
        if entry is None and seen is not None:  # C++ issued it through a process group written in Python
            return replace(seen, site=site or seen.site, entered_s=since, left_s=since, completed_s=None)
        return Call(
            op=entry.op if entry else "",
            group=key,
            seq=done + 1,
            dtype=entry.dtype if entry else None,
            shape=entry.shape if entry else None,
            bytes=entry.bytes if entry else None,
            site=site or (entry.site if entry else None),
            entered_s=since,
        )

    # -- on the device ------------------------------------------------------------------------------

    @property
    def device_groups(self) -> tuple[int, ...]:
        """Return the slots of living groups whose collectives do not block the host, by backend or by their calls so far."""
        page = self.page
        if page is None:
            return ()
        seen = {c.group for c in self.calls if c.on_device} if self._unknown_backends(page) else set()
        return tuple(
            i
            for i in range(page.header.n_groups)
            if not page.groups[i].destroyed
            and (not blocks_host(self.text(page.groups[i].backend)) or self.group_key(page, i) in seen)
        )

    def used_device_groups(self) -> bool:
        """True if this rank has or had a group whose collectives do not block the host: its steps then have no measured waits."""
        page = self.page
        return page is not None and (
            any(not blocks_host(self.text(page.groups[i].backend)) for i in range(page.header.n_groups))
            or any(c.on_device for c in self.calls)
        )

    def _unknown_backends(self, page: Page) -> bool:
        return any(not self.text(page.groups[i].backend) for i in range(page.header.n_groups))

    def has_open_on_device(self) -> bool:
        """True if the device may have an operation in flight: by the counters, or because of messages, which have no counter."""
        page = self.page
        return page is not None and any(
            (g := page.groups[i]).completed < g.enqueued or page.header.n_peers for i in self.device_groups
        )

    def known_on_device(self) -> frozenset[tuple[str, int]]:
        """Return the device collectives that Python issued, as (torch's name of the group, the flight recorder's number)."""
        page = self.page
        assert page is not None
        slots = {self.group_key(page, i): page.groups[i] for i in self.device_groups}
        return frozenset(
            (self.text(slot.name), c.seq + slot.offset)
            for c in self.calls
            if c.seq is not None and (slot := slots.get(c.group)) is not None
        )

    def _device_queue(
        self,
        page: Page,
        calls: tuple[Call, ...],
        enqueued: dict[str, int],
        completed: dict[str, int],
        record: FlightRecord | None,
    ) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """Return (the rank's calls, the oldest open ones in the order of issue).

        A call on a device is open until the counters show it as complete.
        """
        h = page.header
        keys = {self.group_key(page, i): i for i in self.device_groups}
        open_messages = None
        if record is not None:
            names = {self.text(page.groups[i].name): (key, page.groups[i]) for key, i in keys.items()}
            open_messages = {}
            for (name, op, peer), n in record.open_messages.items():
                if name in names:
                    key, slot = names[name]
                    members = unfold_ranks(self.text(slot.ranks))
                    open_messages[key, op, members[peer] if 0 <= peer < len(members) else None] = n
        calls = device_queue.incomplete(calls, completed, open_messages)
        if self.still_since_s is None or (self.s(h.counted_ns) or 0.0) < self.still_since_s:
            return calls, ()  # its counters are older than its last progress
        in_cpp = {}
        for key, i in keys.items():
            known = self._open_call(page, i, enqueued, completed, record, None, None)
            if known is not None:
                at = self._issued_s(page, i, known.seq or 0, record)
                site = known.site or self._issue_site(h, known)
                in_cpp[key] = replace(known, site=site, entered_s=at, left_s=at, on_device=True)
        return calls, device_queue.heads(calls, keys, enqueued, completed, in_cpp)

    def _issued_s(self, page: Page, group: int, seq: int, record: FlightRecord | None) -> float | None:
        """Return when C++ issued a collective, by the flight recorder; None if it recorded no time."""
        slot = page.groups[group]
        entry = record.entries.get((self.text(slot.name), seq + slot.offset)) if record is not None else None
        if entry is None or not entry.created_ns:
            return None
        known = self.issued_s.get(group)
        if known is None or known[0] != seq:  # the difference of the clocks varies a little: keep the first result
            known = self.issued_s[group] = seq, (entry.created_ns - wall_offset_ns() - self.start_ns) / 1e9
        return known[1]

    def _issue_site(self, h: Header, call: Call) -> Site | None:
        """Return the user's line at which C++ issued this operation, if the flight recorder has no stack of it.

        DDP broadcasts buffers in forward and reduces gradients in backward. Other operations are functional collectives:
        the host is at the line that called them, or close to it.
        """
        if h.blocked == Blocked.DDP:
            return self.site(h.blocked_site)
        if h.n_models and call.op in ("all_reduce", "broadcast", ""):
            sites = self.site_counts.get("forward" if call.op == "broadcast" else "backward")
            if sites:
                return sites.most_common(1)[0][0]
        return next(iter(self.stack(h)), None)

    def _blocked_by_device(
        self,
        page: Page,
        kind: str | None,
        queued: tuple[Call, ...],
        enqueued: dict[str, int],
        completed: dict[str, int],
    ) -> Call | None:
        """Return the operation that the host waits for, if its native frames show a wait for the device."""
        if kind == HostWait.DEVICE:
            return device_queue.waited_for(queued)
        if kind != HostWait.COMMUNICATOR:
            return None
        # C++ is creating the communicator of a group's first collective: nothing is enqueued yet
        h = page.header
        first = [
            i for i in self.device_groups if (k := self.group_key(page, i)) not in completed and enqueued.get(k, 0) > 0
        ]
        if len(first) != 1:
            return None
        key = self.group_key(page, first[0])
        site = self.site(h.blocked_site) if h.blocked == Blocked.DDP else None
        return Call(op="", group=key, seq=enqueued[key], site=site, entered_s=self.still_since_s)
