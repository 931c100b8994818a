"""From a rank's page to a `RankState`: the only place that knows both forms."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Site
from distdiag.monitor.evidence.ask import FlightRecord, wall_offset_ns
from distdiag.monitor.evidence.native import HostWait
from distdiag.monitor.ranks import device_queue
from distdiag.monitor.ranks.activity import activity_of
from distdiag.monitor.ranks.follow import PageView
from distdiag.page.layout import CALLS, Blocked, Header, LifeWord, Page, Phase
from distdiag.terms.backends import blocks_host
from distdiag.terms.ranks import unfold_ranks

_CPP_WAITS = ("_functional_collectives.", "_ops.")  # innermost Python frames below which C++ waits for a collective


def _issue_stack(site: Site, stack: tuple[Site, ...]) -> tuple[Site, ...]:
    """The user's frames at a call that the host has left since: those outside its function are the same, if it is still in it."""
    for i, frame in enumerate(stack):
        if (frame.file, frame.function) == (site.file, site.function):
            return (site, *stack[i + 1 :])
    return (site,)


@dataclass
class RankView(PageView):
    """What one rank is doing, from its page and what the kernel says of its process."""

    # by group: number and time of the oldest open collective, where C++ issued it
    issued_s: dict[int, tuple[int, float]] = field(default_factory=dict)

    # -- the state ----------------------------------------------------------------------------------

    def life(self, os_state: str | None) -> tuple[str, int | None, int | None]:
        """(life, exit code, signal) from the rank's last words and the kernel's."""
        assert self.page is not None
        h = self.page.header
        end = self.ending
        if end is not None:
            if h.life == LifeWord.RAISED:
                return Life.CRASHED, end.exit_code if end.exit_code is not None else 1, None
            if h.life == LifeWord.EXITING:
                code = h.exit_code  # the script's own; a signal afterwards came while the interpreter shut down
                return (Life.FINISHED if code == 0 else Life.CRASHED), code, end.signal
            if end.exit_code is not None:
                return (Life.FINISHED if end.exit_code == 0 else Life.CRASHED), end.exit_code, None
            if h.life == LifeWord.LEFT_GROUP and end.signal in (None, 6):
                return Life.FINISHED, None, None
            return Life.KILLED, None, end.signal
        if os_state == "T":
            return Life.STOPPED, None, None
        if h.life == LifeWord.RAISED:
            return Life.CRASHED, 1, None
        if h.life == LifeWord.DETACHED:
            return Life.DETACHED, None, None
        if h.life == LifeWord.EXITING:
            return (Life.FINISHED if h.exit_code == 0 else Life.CRASHED), h.exit_code, None
        if h.life == LifeWord.LEFT_GROUP and not h.blocked:
            return Life.FINISHED, None, None
        return (Life.STARTING if h.life == LifeWord.STARTING and not h.step else Life.RUNNING), None, None

    def state(
        self,
        now_s: float,
        idle: bool | None,
        os_state: str | None,
        record: FlightRecord | None,
        host_wait: tuple[str, str] | None = None,
    ) -> RankState:
        """Everything known of this rank now.

        Args:
            now_s: Run time.
            idle: The main thread sleeps and has used no CPU lately.
            os_state: The kernel's letter for the main thread.
            record: Its flight record, taken since it last moved.
            host_wait: What its native frames show: (device, communicator or no; the function).
        """
        page = self.page
        assert page is not None
        h = page.header
        life, exit_code, signal = self.life(os_state)
        heartbeat_s = self.s(h.heartbeat_ns)
        enqueued, completed = self._counters(page, record)
        blocked = None
        if life in (Life.RUNNING, Life.STARTING):
            blocked = self._blocked(page, now_s, idle, enqueued, completed, record)
        calls, queued = tuple(self.calls), ()
        kind, function = host_wait or (None, "")
        if self.device_groups:
            calls, queued = self._device_queue(page, calls, enqueued, completed, record)
            if blocked is None and life in (Life.RUNNING, Life.STARTING):
                blocked = self._blocked_by_device(page, kind, queued, enqueued, completed)
        stack = self.stack(h)
        on_device = blocked is not None and blocked.on_device and kind == HostWait.DEVICE
        if (
            blocked is not None
            and blocked.site is not None
            and not on_device
            and (not stack or stack[0] != blocked.site)
        ):
            stack = (blocked.site, *stack[1:])
        place = stack[0] if stack else None
        if on_device and blocked is not None and blocked.site is not None:
            stack = _issue_stack(blocked.site, stack)
        ended_s = self.ended_s
        if life in (Life.CRASHED, Life.FINISHED) and h.exception_depth:  # what it raised, or where it called sys.exit
            stack = tuple(s for i in range(h.exception_depth) if (s := self.site(h.exception_stack[i])))
            place = stack[0] if stack else place
            if h.exception_ns:
                ended_s = self.s(h.exception_ns)
        if life == Life.KILLED and self.calls:
            last = self.calls[-1]
            seen_s = self.s(h.stack_ns) or 0.0
            if last.completed_s is None and last.site is not None and (last.entered_s or 0.0) > seen_s:
                stack = (last.site, *(s for s in stack if s.function != last.site.function))
                place = last.site
        silent_s = now_s - heartbeat_s if heartbeat_s is not None else None
        activity = self._activity(h, life, blocked, place, os_state, idle, silent_s)
        if activity not in ("waiting", "stopped", "gil_held") and kind == HostWait.DEVICE and life == Life.RUNNING:
            activity = "device"
        return RankState(
            rank=h.rank,
            node=h.node,
            local_rank=h.local_rank,
            host=self.text(h.host),
            pid=h.pid,
            life=life,
            exit_code=exit_code,
            signal=signal,
            exception=self.text(h.exception) or None,
            ended_s=ended_s,
            heartbeat_age_s=silent_s,
            phase=Phase(h.phase).name.lower(),
            phase_since_s=self.s(h.phase_since_ns),
            step=h.step,
            epoch=h.epoch if h.epoch >= 0 else None,
            place=place,
            activity=activity,
            activity_since_s=self.still_since_s,
            enqueued=enqueued,
            completed=completed,
            blocked=blocked,
            queued=queued,
            host_wait=kind,
            host_wait_in=function,
            wait_measured=not self.used_device_groups(),
            calls=calls,
            p2p_issued=self.p2p(page),
            sites=self.sites(page),
            visits=self.visits.known(),
            visits_whole=self.visits.whole,
            host_blocked=idle,
            user_stack=stack,
            loaders=self.loaders(page),
            models=self.models(page),
            samples=tuple(self.samples),
            steps=tuple(self.steps),
            ddp_times=tuple(self.ddp_times.kept),
            ended_waiting=life == Life.KILLED and self._died_waiting(h),
            in_join=bool(h.in_join),
            caught=self.text(h.caught) or None,
            caught_s=self.s(h.caught_ns),
            memory=tuple(self.memory),
            device_memory=tuple(self.device_memory),
            rss_bytes=self.rss_bytes,
            warm_since_s=self.warm_since_s,
            device_bytes=h.device_peak_bytes or None,
            device_total_bytes=h.device_total_bytes or None,
            cpu_pct=self.cpu_pct,
            queued_share=self.queued_share,
            workers_starved=self.workers_starved,
            workers_busy=self.workers_busy,
            phase_places={p: tuple(c.most_common(3)) for p, c in self.place_counts.items()},
            phase_stacks={p: self.place_stacks[(p, c.most_common(1)[0][0])] for p, c in self.place_counts.items() if c},
            longest_usual_s=self.longest_usual_s,
        )

    def _died_waiting(self, h: Header) -> bool:
        in_call = bool(self.calls) and self.calls[-1].completed_s is None
        return h.blocked != Blocked.NO or in_call or self.died_in_background

    def _counters(self, page: Page, record: FlightRecord | None) -> tuple[dict[str, int], dict[str, int]]:
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
            if record is not None and not slot.offset:  # else its numbers are others
                name = self.text(slot.name)
                if name in record.enqueued and not slot.destroyed:
                    completed[key] = record.completed[name]
                    enqueued[key] = max(slot.enqueued, record.enqueued[name])
                    if record.enqueued[name] == record.completed[name] and self._captured(key, record.completed[name]):
                        enqueued[key] = record.completed[name]
        for i in range(page.header.n_peers):
            slot = page.peers[i]
            if slot.peer == -3:
                enqueued[f"{self.group_key(page, slot.group)} (monitored_barrier)"] = slot.count
        return enqueued, completed

    def _captured(self, group: str, recorded: int) -> bool:
        """True if all calls after number `recorded` have returned: they are not in the flight record, so a graph captured them.

        A captured collective takes a number and is never enqueued.
        """
        missing = [c for c in self.calls if c.group == group and c.seq is not None and c.seq > recorded]
        return bool(missing) and all(c.on_device and c.left_s is not None for c in missing)

    def _blocked(
        self,
        page: Page,
        now_s: float,
        idle: bool | None,
        enqueued: dict[str, int],
        completed: dict[str, int],
        record: FlightRecord | None,
    ) -> Call | None:
        """The operation the main thread waits in, if it does."""
        h = page.header
        site = self.site(h.blocked_site)
        since = self.s(h.blocked_since_ns)
        if h.blocked in (Blocked.WAIT, Blocked.GROUP):
            rec = page.calls[(h.blocked_at - 1) % CALLS]
            if rec.number != h.blocked_at or rec.left_ns:
                return None
            call = self._call(page, rec)
            return Call(
                **{f: getattr(call, f) for f in call.__struct_fields__ if f not in ("site", "entered_s")},
                site=site or call.site,
                entered_s=since,
            )
        if not idle:
            return None
        if h.blocked == Blocked.NO and self.in_cpp_wait():
            return self._functional(page, enqueued, completed, record)
        if h.blocked != Blocked.DDP:
            return None
        if h.counted_ns < h.blocked_since_ns:
            return None  # its counters are older than its wait
        return self._open_call(page, h.blocked_at, enqueued, completed, record, site, since)

    # -- waits of the device ---------------------------------------------------------------------------

    @property
    def device_groups(self) -> tuple[int, ...]:
        """Slots of the living groups in whose collectives the host does not wait, by their backend or by what was seen."""
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
        """True if this rank has, or had, a group in whose collectives the host does not wait: its steps hold no such waits."""
        page = self.page
        return page is not None and (
            any(not blocks_host(self.text(page.groups[i].backend)) for i in range(page.header.n_groups))
            or any(c.on_device for c in self.calls)
        )

    def _unknown_backends(self, page: Page) -> bool:
        return any(not self.text(page.groups[i].backend) for i in range(page.header.n_groups))

    def has_open_on_device(self) -> bool:
        """Whether the device has a collective in flight, by the counters; messages have none."""
        page = self.page
        return page is not None and any(
            (g := page.groups[i]).completed < g.enqueued or page.header.n_peers for i in self.device_groups
        )

    def known_on_device(self) -> frozenset[tuple[str, int]]:
        """Collectives of device groups that Python issued: (torch's name of the group, number of the flight recorder)."""
        page = self.page
        assert page is not None
        slots = {self.group_key(page, i): page.groups[i] for i in self.device_groups}
        return frozenset(
            (self.text(slot.name), c.seq + slot.offset)
            for c in self.calls
            if c.seq is not None and (slot := slots.get(c.group)) is not None
        )

    def progress_mark(self) -> tuple[Any, ...]:
        """Changes when the host or the device of this rank makes progress."""
        assert self.page is not None
        page = self.page
        return (*self._still_mark, *(page.groups[i].completed for i in range(page.header.n_groups)))

    def _device_queue(
        self,
        page: Page,
        calls: tuple[Call, ...],
        enqueued: dict[str, int],
        completed: dict[str, int],
        record: FlightRecord | None,
    ) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """(its calls, those on the device open until the counters say otherwise; the oldest open ones by order of issue)"""
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
            return calls, ()  # its counters are older than its last step forward
        in_cpp = {}
        for key, i in keys.items():
            known = self._open_call(page, i, enqueued, completed, record, None, None)
            if known is not None:
                at = self._issued_s(page, i, known.seq or 0, record)
                site = known.site or self._issue_site(h, known)
                in_cpp[key] = replace(known, site=site, entered_s=at, left_s=at, on_device=True)
        return calls, device_queue.heads(calls, keys, enqueued, completed, in_cpp)

    def _issued_s(self, page: Page, group: int, seq: int, record: FlightRecord | None) -> float | None:
        """When C++ issued a collective, by the flight recorder; None where it does not say."""
        slot = page.groups[group]
        entry = record.entries.get((self.text(slot.name), seq + slot.offset)) if record is not None else None
        if entry is None or not entry.created_ns:
            return None
        known = self.issued_s.get(group)
        if known is None or known[0] != seq:  # the two clocks differ a little each time: one operation has one time
            known = self.issued_s[group] = seq, (entry.created_ns - wall_offset_ns() - self.start_ns) / 1e9
        return known[1]

    def _issue_site(self, h: Header, call: Call) -> Site | None:
        """Return where the user's code makes C++ issue this operation, where the flight recorder has no stack of it.

        DDP broadcasts its buffers in forward and reduces gradients in backward. Others are functional collectives: the host
        is still at the line that called them, or close to it.
        """
        if h.blocked == Blocked.DDP:
            return self.site(h.blocked_site)
        if h.n_models and call.op in ("all_reduce", "broadcast", ""):
            places = self.place_counts.get("forward" if call.op == "broadcast" else "backward")
            if places:
                return places.most_common(1)[0][0]
        return next(iter(self.stack(h)), None)

    def _blocked_by_device(
        self,
        page: Page,
        kind: str | None,
        queued: tuple[Call, ...],
        enqueued: dict[str, int],
        completed: dict[str, int],
    ) -> Call | None:
        """The operation that the host waits for, where its native frames show that it waits for its device."""
        if kind == HostWait.DEVICE:
            return device_queue.waited_for(queued)
        if kind != HostWait.COMMUNICATOR:
            return None
        # C++ issued the first collective of a group, and its communicator is not complete: nothing is enqueued yet
        h = page.header
        first = [
            i for i in self.device_groups if (k := self.group_key(page, i)) not in completed and enqueued.get(k, 0) > 0
        ]
        if len(first) != 1:
            return None
        key = self.group_key(page, first[0])
        site = self.site(h.blocked_site) if h.blocked == Blocked.DDP else None
        return Call(op="", group=key, seq=enqueued[key], site=site, entered_s=self.still_since_s)

    def in_cpp_wait(self) -> bool:
        """Whether the main thread was last seen in torch's own code that calls C++, as functional collectives do."""
        assert self.page is not None
        return self.text(self.page.header.raw_innermost).startswith(_CPP_WAITS)

    def _functional(
        self, page: Page, enqueued: dict[str, int], completed: dict[str, int], record: FlightRecord | None
    ) -> Call | None:
        """The collective that a rank waits for within C++ (functional collectives, DTensor, compiled code): no hook of ours
        sees that wait, but the main thread sleeps in torch's call and one collective of one group is open."""
        h = page.header
        if self.still_since_s is None or h.stack_ns / 1e9 < self.still_since_s + self.start_ns / 1e9:
            return None  # its stack is older than its standing still
        if h.counted_ns < h.stack_ns:
            return None  # its counters are
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
        """The oldest collective of a group that was issued and is not completed, by the flight recorder's counters."""
        key = self.group_key(page, group)
        done = completed.get(key)
        if done is None or done >= enqueued.get(key, 0):
            return None
        entry = None
        if record is not None and group < page.header.n_groups:
            slot = page.groups[group]
            entry = record.entries.get((self.text(slot.name), done + 1 + slot.offset))
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

    def _activity(
        self,
        h: Header,
        life: str,
        blocked: Call | None,
        place: Site | None,
        os_state: str | None,
        idle: bool | None,
        silent_s: float | None,
    ) -> str:
        if life == Life.STOPPED:
            return "stopped"
        if life in (Life.CRASHED, Life.KILLED, Life.FINISHED):
            return {Life.CRASHED: "crashed", Life.KILLED: "killed", Life.FINISHED: "finished"}[Life(life)]
        if blocked is not None:
            return "waiting"
        if silent_s is not None and silent_s > 1.5:
            return "gil_held"
        line = linecache.getline(place.file, place.line).strip() if place else ""
        return activity_of(self.text(h.raw_innermost), line, Phase(h.phase), bool(idle))
