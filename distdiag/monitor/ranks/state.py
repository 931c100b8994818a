"""Make the `RankState` of a rank from its page and the kernel's state of its process."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import Any

from distdiag.diagnosis.model.snapshot import Call, Life, RankState, Site, issue_stack
from distdiag.monitor.evidence.ask import FlightRecord
from distdiag.monitor.evidence.native import HostWait
from distdiag.monitor.ranks.activity import activity_of
from distdiag.monitor.ranks.waits import RankWaits
from distdiag.page.layout import Blocked, Header, LifeWord, Phase


@dataclass
class RankView(RankWaits):
    """What one rank is doing, from its page and the kernel's state of its process."""

    def life(self, os_state: str | None) -> tuple[str, int | None, int | None]:
        """Return (life, exit code, signal), as the rank last wrote them and as the kernel reports them."""
        assert self.page is not None
        h = self.page.header
        end = self.ending
        if end is not None:
            if h.life == LifeWord.RAISED:
                return Life.CRASHED, end.exit_code if end.exit_code is not None else 1, None
            if h.life == LifeWord.EXITING:
                code = h.exit_code  # the script's; a signal afterwards came during interpreter shutdown
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
        """Return the state of this rank now.

        Args:
            now_s: Run time.
            idle: True if the main thread sleeps and has used no CPU lately.
            os_state: The kernel's letter for the main thread.
            record: Its flight record, taken since it last made progress.
            host_wait: From its native frames: (a `HostWait`, the function it waits in).
        """
        page = self.page
        assert page is not None
        h = page.header
        life, exit_code, signal = self.life(os_state)
        heartbeat_s = self.s(h.heartbeat_ns)
        enqueued, completed = self._counters(page, record)
        blocked = None
        if life in (Life.RUNNING, Life.STARTING):
            blocked = self._blocked(page, idle, enqueued, completed, record)
        calls, queued = tuple(self.calls), ()
        kind, function = host_wait or (None, "")
        if kind == HostWait.DEVICE and (self.s(h.counted_ns) or 0.0) < (self.still_since_s or 0.0):
            kind = None  # its counters are older than its last progress
        if self.device_groups:
            calls, queued = self._device_queue(page, calls, enqueued, completed, record)
            if blocked is None and life in (Life.RUNNING, Life.STARTING):
                blocked = self._blocked_by_device(page, kind, queued, enqueued, completed)
        on_device = blocked is not None and blocked.on_device and kind == HostWait.DEVICE
        stack, site = self._stack_and_site(h, life, blocked, on_device)
        silent_s = now_s - heartbeat_s if heartbeat_s is not None else None
        activity = self._activity(h, life, blocked, site, os_state, idle, silent_s)
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
            ended_s=self._ended_s(h, life),
            heartbeat_age_s=silent_s,
            phase=Phase(h.phase).name.lower(),
            phase_since_s=self.s(h.phase_since_ns),
            step=h.step,
            epoch=h.epoch if h.epoch >= 0 else None,
            current_site=site,
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
            visits_complete=self.visits.whole,
            host_blocked=idle,
            user_stack=stack,
            host_stack=self.stack(h) if on_device else (),
            loaders=self.loaders(page),
            models=self.models(page),
            samples=tuple(self.samples),
            steps=tuple(self.steps),
            ddp_times=tuple(self.ddp_times.kept),
            ended_waiting=life == Life.KILLED and self._died_waiting(h),
            in_join=bool(h.in_join),
            caught=self.text(h.caught) or None,
            caught_s=self.s(h.caught_ns),
            handling=self.text(h.handling) or None,
            handling_site=self.site(h.handling_site),
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
            phase_sites={p: tuple(c.most_common(3)) for p, c in self.site_counts.items()},
            phase_stacks={p: self.site_stacks[(p, c.most_common(1)[0][0])] for p, c in self.site_counts.items() if c},
            longest_delay_s=self.longest_delay_s,
        )

    def _stack_and_site(
        self, h: Header, life: str, blocked: Call | None, on_device: bool
    ) -> tuple[tuple[Site, ...], Site | None]:
        """Return (the user's stack, the host's site): from the newest sample, the call it waits in, or where it ended."""
        stack = self.stack(h)
        wait_site = blocked.site if blocked is not None else None
        if wait_site is not None and not on_device and (not stack or stack[0] != wait_site):
            stack = (wait_site, *stack[1:])
        site = stack[0] if stack else None
        if wait_site is not None and on_device:
            return issue_stack(wait_site, stack), site
        if life in (Life.CRASHED, Life.FINISHED) and h.exception_depth:  # where it raised, or called sys.exit
            stack = tuple(s for i in range(h.exception_depth) if (s := self.site(h.exception_stack[i])))
            return stack, stack[0] if stack else site
        if life == Life.KILLED and (entered := self._entered(h, self.s(h.stack_ns) or 0.0)) is not None:
            return (entered, *(frame for frame in stack if frame.function != entered.function)), entered
        return stack, site

    def _entered(self, h: Header, sampled_s: float) -> Site | None:
        """Return where the main thread entered a collective, or a pass of DDP, after its last sample; None if it did not.

        The page has it from the main thread itself: a rank may be killed before the next sample.
        """
        last = self.calls[-1] if self.calls else None
        if last is not None and last.completed_s is None and (last.entered_s or 0.0) > sampled_s:
            return last.site
        ddp = h.blocked == Blocked.DDP and (self.s(h.blocked_since_ns) or 0.0) > sampled_s
        return self.site(h.blocked_site) if ddp else None

    def _ended_s(self, h: Header, life: str) -> float | None:
        """Return when the rank raised, else when its process ended."""
        raised = life in (Life.CRASHED, Life.FINISHED) and h.exception_depth and h.exception_ns
        return self.s(h.exception_ns) if raised else self.ended_s

    def _died_waiting(self, h: Header) -> bool:
        in_call = bool(self.calls) and self.calls[-1].completed_s is None
        return h.blocked != Blocked.NO or in_call or self.died_in_background

    def progress_mark(self) -> tuple[Any, ...]:
        """Return a value that changes when the host or the device of this rank makes progress."""
        assert self.page is not None
        page = self.page
        return (*self._still_mark, *(page.groups[i].completed for i in range(page.header.n_groups)))

    def _activity(
        self, h: Header, life: str, blocked: Call | None, site: Site | None, os_state: str | None, idle: bool | None,
        silent_s: float | None,
    ) -> str:  # fmt: skip
        if life == Life.STOPPED:
            return "stopped"
        if life in (Life.CRASHED, Life.KILLED, Life.FINISHED):
            return {Life.CRASHED: "crashed", Life.KILLED: "killed", Life.FINISHED: "finished"}[Life(life)]
        if blocked is not None:
            return "waiting"
        if silent_s is not None and silent_s > 1.5:
            return "gil_held"
        line = linecache.getline(site.file, site.line).strip() if site else ""
        return activity_of(self.text(h.raw_innermost), line, Phase(h.phase), bool(idle))
