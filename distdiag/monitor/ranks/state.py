"""One rank as the monitor sees it: its `RankState`, from its page and the kernel's state of its process."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from signal import SIGABRT, SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any

from distdiag import source_files
from distdiag.diagnosis.model.snapshot import DEAD, Call, Life, RankState, Site, issue_stack
from distdiag.monitor.evidence.ask import FlightRecord
from distdiag.monitor.evidence.native import HostWait
from distdiag.monitor.host.processes import Ending
from distdiag.monitor.ranks.decode import PageDecoder
from distdiag.monitor.ranks.device_queue import DeviceGroups
from distdiag.monitor.ranks.follow import RankHistory
from distdiag.monitor.ranks.waits import IssueTimes, RankWaits
from distdiag.page.layout import Blocked, LifeWord, Phase, page_path
from distdiag.page.reader import PageError, PageReader
from distdiag.terms import activity
from distdiag.terms.signals import NATIVE_CRASHES

MEMORY_S, MEMORY_SAMPLES, MEMORY_KEPT = 32.0, 40, 600
MEMORY_RATE = 1 << 20  # bytes per second; slower growth needs minutes of samples anyway
_ALIVE = (Life.RUNNING, Life.STARTING)
_course = partial(deque[tuple[float, int]], maxlen=MEMORY_KEPT)


@dataclass(slots=True)
class Gauges:
    """What the samples of the host show about a rank; each name is that of `RankState`."""

    memory: deque[tuple[float, int]] = field(default_factory=_course)
    worker_memory: deque[tuple[float, int]] = field(default_factory=_course)  # begins anew with other workers
    device_memory: deque[tuple[float, int]] = field(default_factory=_course)
    rss_bytes: int | None = None
    cpu_pct: float | None = None
    queued_share: float | None = None
    workers_starved: float | None = None
    workers_busy: float | None = None
    dead_child: tuple[int | None, int | None] | None = None
    cpus: tuple[int, ...] = ()
    launcher_cpus: int = 0

    def growing(self) -> bool:
        """True if the memory of this rank, its workers or its device is growing; it is then sampled more often."""
        for course in (self.memory, self.worker_memory, self.device_memory):
            lately = [p for p in itertools.islice(reversed(course), MEMORY_SAMPLES) if course[-1][0] - p[0] <= MEMORY_S]
            if len(lately) > 1 and lately[0][1] - lately[-1][1] > MEMORY_RATE * (lately[0][0] - lately[-1][0]):
                return True
        return False


TOOLS = ("torch.profiler", "autograd's anomaly detection", "tracemalloc")  # the bits of `Header.tools`
_SAMPLED = ("rss_bytes", "cpu_pct", "queued_share", "workers_starved", "workers_busy", "dead_child", "cpus", "launcher_cpus")  # fmt: skip
_WRITTEN = ("rank", "node", "local_rank", "pid", "step")  # in the header, under the same names
_sampled, _written = attrgetter(*_SAMPLED), attrgetter(*_WRITTEN)
# A handler of these signals that ends the script does so with 128 + their number, by convention.
_BY_HANDLER = {128 + n: int(n) for n in (SIGTERM, SIGINT, SIGHUP, SIGQUIT)}
_TEARDOWN_CRASHES = NATIVE_CRASHES - {SIGABRT}  # an abort then is no failure: see `life`


def _of_exit(code: int) -> tuple[str, int | None, int | None]:
    """Return (life, exit code, signal) of a process that ended with this code."""
    if code in _BY_HANDLER:
        return Life.KILLED, None, _BY_HANDLER[code]
    return (Life.CRASHED if code else Life.FINISHED), code, None


class RankView:
    """One rank: its page, what was read of it so far, and how its process ended."""

    def __init__(self, path: Path, start_ns: int) -> None:
        """Open a page.

        Raises:
            PageError: it is not a page that can be read, or the page of another rank than its name says.
            OSError: it cannot be opened.
        """
        self.reader = PageReader(path)
        self.decoder = PageDecoder(self.reader, start_ns)
        self.history = RankHistory(self.decoder)
        self.device = DeviceGroups(self.decoder, self.history)
        self.gauges = Gauges()
        self.header, self.text, self.s = self.decoder.header, self.decoder.text, self.decoder.s
        self.first_header = self.reader.header()  # as it was when the page was opened
        self.rank = self.first_header.rank
        if path.name != page_path(path.parent, self.rank).name:
            raise PageError(f"{path.name} is damaged: rank is {self.rank}")
        self.refresh = self.history.refresh
        self.ending: Ending | None = None
        self.ended_s: float | None = None
        self.longest_delay_s = 0.0
        self.died_in_background = False  # a fatal signal in a thread of gloo or NCCL
        self._issued_s: IssueTimes = {}

    def file(self, kind: str) -> Path:
        """Return the path of a file next to the page: `trace`, `native` (on request), `fatal` (at a signal)."""
        return self.reader.path.with_name(f"r{self.rank}.{kind}")

    def still_s(self, now_s: float) -> float:
        """Return how long the host has made no progress; 0 if that is not known."""
        since_s = self.history.still_since_s
        return 0.0 if since_s is None else now_s - since_s

    def recorder(self) -> dict[str, Any]:
        """Return the state of the recorder itself, as a row of table `rank` has it."""
        h = self.header
        return {
            "gpu": h.gpu if h.gpu >= 0 else None,
            "dropped": h.dropped + self.history.missed,
            "recorder_errors": h.errors,
            "recorder_error": self.text(h.error) or None,
        }

    def life(self, os_state: str | None) -> tuple[str, int | None, int | None]:
        """Return (life, exit code, signal), as the rank last wrote them and as the kernel reports them."""
        h, end = self.header, self.ending
        if end is not None:
            if h.life == LifeWord.RAISED:
                return Life.CRASHED, end.exit_code if end.exit_code is not None else 1, None
            if h.life == LifeWord.EXITING:
                # the recorder knows the code only where it runs the script
                life, code, signal = _of_exit(h.exit_code or end.exit_code or 0)
                return life, code, signal or end.signal  # a signal afterwards came during interpreter shutdown
            if h.life == LifeWord.LEFT_GROUP and self._at_rest():
                return Life.FINISHED, None, None
            if end.exit_code is not None:
                return _of_exit(end.exit_code)
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
            return _of_exit(h.exit_code)
        if h.life == LifeWord.LEFT_GROUP and not h.blocked:
            return Life.FINISHED, None, None
        return (Life.STARTING if h.life == LifeWord.STARTING and not h.step else Life.RUNNING), None, None

    def _at_rest(self) -> bool:
        """True if no line of the script has run since the rank joined, or left, its groups: its task is done.

        By the newest sample; before the first one after it left, the line that leaves them may be the last.
        """
        h, end = self.header, self.ending
        if h.life == LifeWord.LEFT_GROUP:
            # a launcher may end a rank that was seen at rest with any code; before that, the code is its own (`os._exit`)
            own = end is not None and ((end.exit_code and not h.stack_ns) or end.signal in _TEARDOWN_CRASHES)
            return not own and not (h.stack_ns and h.stack_depth)
        return h.life == LifeWord.RUNNING and bool(h.stack_ns) and not h.stack_depth and not h.blocked

    def state(
        self,
        now_s: float,
        idle: bool | None = None,
        os_state: str | None = None,
        record: FlightRecord | None = None,
        host_wait: tuple[str, str] | None = None,
    ) -> RankState:
        """Return the state of this rank now.

        Args:
            idle: True if the main thread sleeps and has used no CPU lately.
            os_state: The kernel's letter for the main thread.
            host_wait: From its native frames: (a `HostWait`, the function it waits in).
        """
        h, decoder, history = self.header, self.decoder, self.history
        life, exit_code, signal = self.life(os_state)
        heartbeat_s = self.s(h.heartbeat_ns)
        waits = RankWaits(decoder, history, self.device, record, self._issued_s)
        blocked = waits.on_host(idle) if life in _ALIVE else None
        calls, queued = tuple(history.calls), ()
        kind, function = host_wait or (None, "")
        if kind == HostWait.DEVICE and (self.s(h.counted_ns) or 0.0) < (history.still_since_s or 0.0):
            kind = None  # its counters are older than its last progress
        if self.device.groups:
            calls, queued = waits.queue()
            if blocked is None and life in _ALIVE:
                blocked = waits.for_device(kind, queued)
        on_device = blocked is not None and blocked.on_device and kind == HostWait.DEVICE
        stack, site = self._stack_and_site(life, blocked, on_device)
        silent_s = now_s - heartbeat_s if heartbeat_s is not None else None
        doing = self._activity(life, blocked, site, idle, silent_s)
        if doing not in ("waiting", "stopped", "gil_held") and kind == HostWait.DEVICE and life == Life.RUNNING:
            doing = "device"
        return RankState(
            **self._of_page(),
            **self._of_history(),
            life=life,
            exit_code=exit_code,
            signal=signal,
            ended_s=self._ended_s(life),
            heartbeat_age_s=silent_s,
            current_site=site,
            activity=doing,
            enqueued=waits.enqueued,
            completed=waits.completed,
            blocked=blocked,
            queued=queued,
            host_wait=kind,
            host_wait_in=function,
            wait_measured=not self.device.used(),
            calls=calls,
            host_blocked=idle,
            user_stack=stack,
            host_stack=decoder.stack() if on_device else (),
            ended_waiting=life == Life.KILLED and self._died_waiting(),
            ended_at_rest=life in DEAD and self._at_rest(),
            longest_delay_s=self.longest_delay_s,
        )

    def _of_page(self) -> dict[str, Any]:
        """Return the fields of the state that the rank itself has written."""
        h, decoder = self.header, self.decoder
        return {
            **dict(zip(_WRITTEN, _written(h), strict=True)),
            "host": self.text(h.host),
            "exception": self.text(h.exception) or None,
            "phase": Phase(h.phase).name.lower(),
            "phase_since_s": self.s(h.phase_since_ns),
            "epoch": h.epoch if h.epoch >= 0 else None,
            "p2p_issued": decoder.p2p(),
            "sites": decoder.sites(),
            "loaders": decoder.loaders(),
            "models": decoder.models(),
            "in_join": bool(h.in_join),
            "caught": self.text(h.caught) or None,
            "caught_s": self.s(h.caught_ns),
            "handling": self.text(h.handling) or None,
            "handling_site": decoder.site(h.handling_site),
            "gc_s": h.gc_ns / 1e9,
            "gc_count": h.gc_count,
            "gc_off": bool(h.gc_off),
            "tools": tuple(name for i, name in enumerate(TOOLS) if h.tools >> i & 1),
            "thread": self.text(h.thread),
            "thread_share": h.thread_permille / 1000,
            "thread_site": decoder.site(h.thread_site),
            "store_key": self._store_key(),
            "store_set": h.store_set.decode("utf-8", "replace"),
            "store_set_site": decoder.site(h.store_set_site),
            "device_bytes": h.device_peak_bytes or None,
            "device_total_bytes": h.device_total_bytes or None,
        }

    def _of_history(self) -> dict[str, Any]:
        """Return the fields of the state that earlier polls and the samples of the host have shown."""
        history, gauges = self.history, self.gauges
        return {
            **dict(zip(_SAMPLED, _sampled(gauges), strict=True)),
            **history.phases(),
            "activity_since_s": history.still_since_s,
            "visits": history.visits.known(),
            "samples": (*history.first, *history.samples),
            "steps": tuple(history.steps),
            "ddp_times": tuple(history.ddp_times.kept),
            "logged": {name: tuple(values) for name, values in history.logged.items()},
            "warm_since_s": history.warm_since_s,
            "memory": tuple(gauges.memory),
            "worker_memory": tuple(gauges.worker_memory),
            "device_memory": tuple(gauges.device_memory),
        }

    def _stack_and_site(self, life: str, blocked: Call | None, on_device: bool) -> tuple[tuple[Site, ...], Site | None]:
        """Return (the user's stack, the host's site), from the newest sample, the call it waits in, or its end."""
        h, stack = self.header, self.decoder.stack()
        wait_site = blocked.site if blocked is not None else None
        if wait_site is not None and not on_device and (not stack or stack[0] != wait_site):
            stack = _with_innermost(wait_site, stack, stack[1:])
        site = stack[0] if stack else None
        if wait_site is not None and on_device:
            return issue_stack(wait_site, stack), site
        if life in (Life.CRASHED, Life.FINISHED) and h.exception_depth:  # where it raised, or called sys.exit
            stack = tuple(s for i in range(h.exception_depth) if (s := self.decoder.site(h.exception_stack[i])))
            return stack, stack[0] if stack else site
        if h.life == LifeWord.EXITING:
            return (), None  # where it called sys.exit is known only where the recorder runs the script
        if life == Life.KILLED and (entered := self._entered(self.s(h.stack_ns) or 0.0)) is not None:
            return _with_innermost(entered, stack, stack), entered
        return stack, site

    def _entered(self, sampled_s: float) -> Site | None:
        """Return where the main thread entered its newest collective or pass of DDP since its last sample, or None.

        The page has it from the main thread itself: a rank may be killed before the next sample, also when it has left that call.
        """
        h, last = self.header, next((c for c in reversed(self.history.calls) if not c.other_thread), None)
        entered_s = (last.entered_s or 0.0) if last is not None else 0.0
        ddp_s = (self.s(h.blocked_since_ns) or 0.0) if h.blocked == Blocked.DDP else 0.0
        if max(entered_s, ddp_s) <= sampled_s:
            return None
        return last.site if last is not None and entered_s > ddp_s else self.decoder.site(h.blocked_site)

    def _ended_s(self, life: str) -> float | None:
        """Return when the rank raised, else when its process ended."""
        h = self.header
        raised = life in (Life.CRASHED, Life.FINISHED) and h.exception_depth and h.exception_ns
        return self.s(h.exception_ns) if raised else self.ended_s

    def _died_waiting(self) -> bool:
        calls = self.history.calls
        in_call = bool(calls) and calls[-1].completed_s is None
        return self.header.blocked != Blocked.NO or in_call or self.died_in_background

    def _store_key(self) -> str:
        """Return the key that it waits for; none if it has asked for one in vain, and has done something else since."""
        h, asked_s = self.header, self.s(self.header.store_asked_ns)
        left = asked_s is not None and asked_s < (self.history.still_since_s or 0.0)
        return "" if left else h.store_key.decode("utf-8", "replace")

    def progress_mark(self) -> tuple[Any, ...]:
        """Return a value that changes when the host or the device of this rank makes progress."""
        groups = self.decoder.page.groups[: self.header.n_groups]
        return (*self.history.still_mark, *(group.completed for group in groups))

    def _activity(
        self, life: str, blocked: Call | None, site: Site | None, idle: bool | None, silent_s: float | None
    ) -> str:
        if life in (Life.STOPPED, Life.CRASHED, Life.KILLED, Life.FINISHED):
            return str(life)
        if blocked is not None:
            return "waiting"
        if silent_s is not None and silent_s > 1.5:
            return "gil_held"
        if self._store_key():
            return "store_key"
        line = source_files.line(site.file, site.line) if site else ""
        return activity_of(self.text(self.header.raw_innermost), line, Phase(self.header.phase), bool(idle))


def _with_innermost(site: Site, sampled: tuple[Site, ...], callers: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return the frames at `site`, which is newer than the sample: its own callers where its function was in the sample.

    Otherwise `callers` are taken for them.
    """
    outer = site.path[-1]
    known = any((frame.file, frame.function) == (outer.file, outer.function) for frame in sampled)
    return issue_stack(site, sampled) if known else (site, *callers)


def activity_of(raw_innermost: str, line: str, phase: Phase, idle: bool) -> str:
    """Return one of the words of `findings.Where.state`, for a living rank that does not wait in a collective."""
    if phase == Phase.DATA:
        return "data"
    if (word := activity.by_frame(raw_innermost)) is not None:
        return word
    if phase == Phase.CHECKPOINT:
        return "checkpoint"
    return activity.by_line(line, idle) or "user_code"
