"""Find the operation that a rank's host waits in, from its page, its flight record and its native frames."""

from __future__ import annotations

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, Site
from distdiag.monitor.evidence.ask import Entry, FlightRecord, wall_offset_ns
from distdiag.monitor.evidence.native import HostWait
from distdiag.monitor.ranks import device_queue
from distdiag.monitor.ranks.decode import PageDecoder
from distdiag.monitor.ranks.device_queue import DeviceGroups
from distdiag.monitor.ranks.follow import RankHistory
from distdiag.page.layout import BARRIER_PEER, CALLS, Blocked
from distdiag.terms.ranks import unfold_ranks

IssueTimes = dict[int, tuple[int, float]]  # by group: number and time of the oldest open collective, if C++ issued it


class RankWaits:
    """The operation that one rank waits in at one poll, on the host or for its device."""

    def __init__(
        self,
        decoder: PageDecoder,
        history: RankHistory,
        device: DeviceGroups,
        record: FlightRecord | None,
        issued_s: IssueTimes,
    ) -> None:
        self._decoder, self._history, self._device, self._record = decoder, history, device, record
        self._page, self._header, self._issued_s = decoder.page, decoder.header, issued_s
        self._still_since_s = history.still_since_s
        # newest collective issued and completed, by group; the flight record's numbers if they are newer
        self.enqueued: dict[str, int] = dict(history.group_calls)
        self.completed: dict[str, int] = {}
        self._count()

    def _count(self) -> None:
        enqueued, completed, record = self.enqueued, self.completed, self._record
        for generation in range(1, self._header.initialised + 1):
            enqueued[f"init_process_group {generation}"] = 1
        for i, slot in enumerate(self._page.groups[: self._header.n_groups]):
            key = self._decoder.group_key(i)
            enqueued[key] = slot.enqueued
            if slot.completed >= 0:
                completed[key] = slot.completed
            name = self._decoder.text(slot.name)
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
        for slot in self._page.peers[: self._header.n_peers]:
            if slot.peer == BARRIER_PEER:
                enqueued[f"{self._decoder.group_key(slot.group)} (monitored_barrier)"] = slot.count

    def _captured(self, group: str, recorded: int) -> bool:
        """True if a graph captured all calls after number `recorded`: they have returned and are not in the flight record.

        A captured collective takes a number and is never enqueued.
        """
        missing = [c for c in self._history.calls if c.group == group and c.seq is not None and c.seq > recorded]
        return bool(missing) and all(c.on_device and c.left_s is not None for c in missing)

    # -- on the host --------------------------------------------------------------------------------

    def on_host(self, idle: bool | None) -> Call | None:
        """Return the operation that the main thread waits in, by the page."""
        h = self._header
        site, since = self._decoder.site(h.blocked_site), self._decoder.s(h.blocked_since_ns)
        if h.blocked in (Blocked.WAIT, Blocked.GROUP):
            record = self._page.calls[(h.blocked_at - 1) % CALLS]
            if record.number != h.blocked_at or record.left_ns:
                return None
            call = self._history.call(record)
            return replace(call, site=site or call.site, entered_s=since)
        if not idle:
            return None
        if h.blocked == Blocked.NO and self._history.in_cpp_wait():
            return self._functional()
        if h.blocked != Blocked.DDP or h.counted_ns < h.blocked_since_ns:
            return None  # its counters are older than its wait
        return self._open_call(h.blocked_at, site, since)

    def _functional(self) -> Call | None:
        """Return the collective that a rank waits for inside C++ (functional collectives, DTensor, compiled code).

        No hook sees that wait. It is known if the main thread sleeps in torch's call and exactly one group has an open
        collective.
        """
        h, since_s = self._header, self._still_since_s
        if since_s is None or h.stack_ns / 1e9 < since_s + self._decoder.start_ns / 1e9:
            return None  # its stack is older than its last progress
        if h.counted_ns < h.stack_ns:
            return None  # its counters are older than its stack
        site = next(iter(self._decoder.stack()), None)
        living = (i for i in range(h.n_groups) if not self._page.groups[i].destroyed)
        found = [call for i in living if (call := self._open_call(i, site, since_s)) is not None]
        return found[0] if len(found) == 1 else None

    def _entry(self, group: int, seq: int) -> Entry | None:
        if self._record is None or group >= self._header.n_groups:
            return None
        slot = self._page.groups[group]
        return self._record.entries.get((self._decoder.text(slot.name), seq + slot.offset))

    def _open_call(self, group: int, site: Site | None, since: float | None) -> Call | None:
        """Return the oldest collective of a group that was issued and is not completed, by the flight recorder's counters."""
        key = self._decoder.group_key(group)
        done = self.completed.get(key)
        if done is None or done >= self.enqueued.get(key, 0):
            return None
        entry = self._entry(group, done + 1)
        calls = reversed(self._history.calls)
        seen = next((c for c in calls if (c.group, c.seq) == (key, done + 1) and not c.p2p), None)
        if seen is not None and seen.other_thread:  # it came before the main thread's own call
            return replace(seen, entered_s=since, left_s=since, completed_s=None)
        if seen is not None and not seen.asynchronous and (seen.entered_s or 0.0) > (since or 0.0):
            site = seen.site or site  # within DDP's pass, a hook or a handler of a signal called it
        if entry is None and seen is not None:  # C++ issued it through a process group written in Python
            return replace(seen, site=site or seen.site, entered_s=since, left_s=since, completed_s=None)
        call = Call(op="", group=key, seq=done + 1, site=site, entered_s=since)
        if entry is None:
            return call
        return replace(
            call, op=entry.op, dtype=entry.dtype, shape=entry.shape, bytes=entry.bytes, site=site or entry.site
        )

    # -- on the device ------------------------------------------------------------------------------

    def queue(self) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """Return (the rank's calls, the oldest open ones in the order of issue).

        A call on a device is open until the counters show it as complete.
        """
        page, text = self._page, self._decoder.text
        keys = {self._decoder.group_key(i): i for i in self._device.groups}
        open_messages = None
        if self._record is not None:
            names = {text(page.groups[i].name): (key, page.groups[i]) for key, i in keys.items()}
            open_messages = {}
            for (name, op, peer), n in self._record.open_messages.items():
                if name in names:
                    key, slot = names[name]
                    members = unfold_ranks(text(slot.ranks))
                    open_messages[key, op, members[peer] if 0 <= peer < len(members) else None] = n
        calls = device_queue.incomplete(tuple(self._history.calls), self.completed, open_messages)
        if self._still_since_s is None or (self._decoder.s(self._header.counted_ns) or 0.0) < self._still_since_s:
            return calls, ()  # its counters are older than its last progress
        in_cpp = {}
        for key, i in keys.items():
            known = self._open_call(i, None, None)
            if known is not None:
                at, site = self._issue_time_s(i, known.seq or 0), known.site or self._issue_site(known)
                in_cpp[key] = replace(known, site=site, entered_s=at, left_s=at, on_device=True)
        return calls, device_queue.heads(calls, keys, self.enqueued, self.completed, in_cpp)

    def _issue_time_s(self, group: int, seq: int) -> float | None:
        """Return when C++ issued a collective, by the flight recorder; None if it recorded no time."""
        entry = self._entry(group, seq)
        if entry is None or not entry.created_ns:
            return None
        known = self._issued_s.get(group)
        if known is None or known[0] != seq:  # the difference of the clocks varies a little: keep the first result
            at_ns = entry.created_ns - wall_offset_ns() - self._decoder.start_ns
            known = self._issued_s[group] = seq, at_ns / 1e9
        return known[1]

    def _issue_site(self, call: Call) -> Site | None:
        """Return the user's line at which C++ issued this operation, if the flight recorder has no stack of it.

        DDP broadcasts buffers in forward and reduces gradients in backward: the rank counts both by their sites. Of several,
        the one seen most often by the pulse is taken; a device may leave it no time to see any. Other operations are functional
        collectives: the host is at the line that called them, or close to it.
        """
        h = self._header
        if h.blocked == Blocked.DDP:
            return self._decoder.site(h.blocked_site)
        if h.n_models and call.op in ("all_reduce", "broadcast", ""):
            phase = "forward" if call.op == "broadcast" else "backward"
            counted, seen = self._decoder.sites_of(phase), self._history.site_counts.get(phase)
            if len(counted) == 1 or (counted and not seen):
                return counted[0]
            if seen:
                return seen.most_common(1)[0][0]
        return next(iter(self._decoder.stack()), None)

    def for_device(self, kind: str | None, queued: tuple[Call, ...]) -> Call | None:
        """Return the operation that the host waits for, if its native frames show a wait for the device."""
        if kind == HostWait.DEVICE:
            return device_queue.waited_for(queued)
        if kind != HostWait.COMMUNICATOR:
            return None
        # C++ is creating the communicator of a group's first collective: nothing is enqueued yet
        keys = map(self._decoder.group_key, self._device.groups)
        first = [key for key in keys if key not in self.completed and self.enqueued.get(key, 0) > 0]
        if len(first) != 1:
            return None
        h = self._header
        site = self._decoder.site(h.blocked_site) if h.blocked == Blocked.DDP else None
        return Call(op="", group=first[0], seq=self.enqueued[first[0]], site=site, entered_s=self._still_since_s)
