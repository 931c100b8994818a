"""Follow a rank's page over time: read its rings into the types of a snapshot."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from distdiag.diagnosis.model.snapshot import Call, Sample, Site, Step
from distdiag.diagnosis.model.visits import Visits
from distdiag.monitor.host.processes import Ending
from distdiag.monitor.ranks.ddp_times import DdpTimes
from distdiag.monitor.ranks.decode import PageDecoder
from distdiag.page.layout import (
    ASYNC,
    CALLS,
    EVEN,
    FAILED_CALL,
    NEWS,
    NO_GROUP,
    ON_DEVICE,
    OTHER_THREAD,
    P2P,
    ROOTED,
    SAMPLES,
    SCALARS,
    STACK,
    STEPS,
    STILL_NS,
    Blocked,
    CallRecord,
    Header,
    Page,
    Phase,
    SampleKind,
    word,
)
from distdiag.page.reader import PageReader
from distdiag.store.rows import ScalarRow
from distdiag.terms.ranks import unfold_ranks

CALLS_KEPT, STEPS_KEPT = 128, 64
COMPUTES_NS = 500_000_000  # a main thread that uses the CPU counts as computing for this long
_SINCE, _BLOCKED, _BLOCKED_SINCE = map(word, ("phase_since_ns", "blocked", "blocked_since_ns"))
_N_CALLS, _N_STEPS, _N_SAMPLES, _N_SCALARS = map(word, ("n_calls", "n_steps", "n_samples", "n_scalars"))
_VERSION, _DEPTH, _STACK, _STACK_PHASE = map(word, ("stack_version", "stack_depth", "stack", "stack_phase"))
_NO, _DDP = _MAY_COMPUTE = int(Blocked.NO), int(Blocked.DDP)
_PHASES = [p.name.lower() for p in Phase]
ROUTINE_SAMPLES = frozenset(
    {SampleKind.PARAMETERS, SampleKind.BUFFERS, SampleKind.REDUCED, SampleKind.AVERAGED, SampleKind.LEARNING_RATE}
)
SITE_SAMPLES = 400
WARM_STEPS = 20
MEMORY_S, MEMORY_SAMPLES = 32.0, 40
MEMORY_RATE = 1 << 20  # bytes per second; slower growth needs minutes of samples anyway


@dataclass
class PageView(PageDecoder):
    """One rank's page and what has been read of its rings."""

    rank: int = 0
    first_header: Header = field(default_factory=Header)  # as it was when the page was opened
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=CALLS_KEPT))
    _open: dict[int, int] = field(default_factory=dict)
    _calls_read: int = 0
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    _steps_read: int = 0
    ddp_times: DdpTimes = field(default_factory=DdpTimes)
    _samples_read: int = 0
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _scalars_read: int = 0
    _news: bytes = b""
    _samples_checked: int = 0
    _sampled: int = 0  # version of the stack that was counted last
    ending: Ending | None = None
    ended_s: float | None = None
    site_counts: dict[str, Counter[Site]] = field(default_factory=dict)
    site_stacks: dict[tuple[str, Site], tuple[Site, ...]] = field(default_factory=dict)
    visits: Visits = field(default_factory=Visits)
    _shares: bool = False  # it has exchanged floating-point tensors with others while it trained
    group_calls: dict[str, int] = field(default_factory=dict)
    # calls of new_group by name: (number, members, call site)
    new_groups: dict[str, tuple[int, tuple[int, ...], Site | None]] = field(default_factory=dict)
    still_since_s: float | None = None
    _still_mark: tuple[Any, ...] = ()
    memory: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=600))
    device_memory: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=600))
    rss_bytes: int | None = None
    cpu_pct: float | None = None
    queued_share: float | None = None
    workers_starved: float | None = None
    workers_busy: float | None = None
    # not taken yet
    new_steps: list[Step] = field(default_factory=list)
    closed_calls: list[tuple[Call, float]] = field(default_factory=list)  # with the host's wait, s
    missed: int = 0  # steps that were overwritten before they were read
    missed_scalars: int = 0  # the same for logged values: of many a second, only the newest are kept
    missed_calls: int = 0  # the same for calls: their times are lost, their counts are exact
    longest_delay_s: float = 0.0
    warm_since_s: float | None = None
    died_in_background: bool = False  # a fatal signal in a thread of gloo or NCCL

    @classmethod
    def open(cls, path: Path, start_ns: int) -> Self:
        view = cls(PageReader(path), start_ns)
        view.first_header = view.reader.header()
        view.rank = view.first_header.rank
        return view

    def file(self, kind: str) -> Path:
        """Return the path of a file next to the page: `trace`, `native` (stacks on request), `fatal` (stacks at a fatal signal)."""
        return self.reader.path.with_name(f"r{self.rank}.{kind}")

    # -- reading ----------------------------------------------------------------------------------

    def moves_on(self, now_ns: int, idle: Callable[[Self], bool | None]) -> bool:
        """True if the main thread cannot be waiting for another rank, and its records can be read later.

        It has just changed its phase or wait, or it uses the CPU. The latter may be a spinning wait for a GPU, so it counts
        only for a while.

        Args:
            now_ns: Monotonic time.
            idle: Returns True if the rank sleeps and has used no CPU lately; called only if needed.
        """
        if self.page is None:
            return False
        words = self.reader.words
        still_ns = now_ns - max(words[_SINCE], words[_BLOCKED_SINCE])
        if still_ns >= STILL_NS and (
            still_ns >= COMPUTES_NS or words[_BLOCKED] not in _MAY_COMPUTE or idle(self) is not False
        ):
            return False
        return (
            words[_N_CALLS] - self._calls_read < CALLS // 4
            and words[_N_STEPS] - self._steps_read < STEPS // 2
            and words[_N_SCALARS] - self._scalars_read < SCALARS // 2
            and words[NEWS].tobytes() == self._news
            and (words[_N_SAMPLES] == self._samples_checked or self._samples_can_wait(words[_N_SAMPLES]))
        )

    def _samples_can_wait(self, samples: int) -> bool:
        """True if all new samples are of routine kinds, and the ring has room for more."""
        first, self._samples_checked = max(self._samples_checked, self._samples_read), samples
        routine = ROUTINE_SAMPLES.issuperset(self.reader.sample_kinds(first, samples))
        return routine and samples - self._samples_read < SAMPLES // 4

    def refresh(self, now_s: float) -> None:
        """Read the page and the new records in its rings."""
        self._news = self.reader.words[NEWS].tobytes()  # first: what is written meanwhile counts as news
        self.page = page = self.reader.read(-1 if self._open else self._calls_read)
        h = page.header
        self._read_calls(page, h)
        self._read_steps(page, h)
        self.ddp_times.read(page, self.start_ns, itertools.chain(reversed(self.new_steps), reversed(self.steps)))
        while self._samples_read < h.n_samples:
            self._samples_read = max(self._samples_read, h.n_samples - SAMPLES)
            rec = page.samples[self._samples_read % SAMPLES]
            self._samples_read += 1
            kind = SampleKind(rec.kind).name.lower() if rec.kind in list(SampleKind) else "?"
            if rec.kind in (SampleKind.REDUCED, SampleKind.AVERAGED) and rec.value:
                self._shares = True
            at, t_s = self.site(rec.site), self.s(rec.t_ns)
            alone = h.world_size > 1 and not h.n_models and not self._shares
            self.samples.append(Sample(kind, rec.step, rec.value, rec.key, self.text(rec.name), at, t_s, alone))
        mark = (h.n_calls, h.n_steps, h.step, h.blocked, h.blocked_at, h.micro_steps, h.phase, h.phase_since_ns)
        mark += tuple(page.groups[i].enqueued for i in range(h.n_groups))
        mark += tuple(page.loaders[i].batches for i in range(h.n_loaders))
        if mark != self._still_mark:
            self._still_mark = mark
            self.still_since_s = now_s

    def _read_calls(self, page: Page, h: Header) -> None:
        if h.n_calls - self._calls_read > CALLS:
            self.missed_calls += h.n_calls - CALLS - self._calls_read
            self.visits.forget()
            self._calls_read = h.n_calls - CALLS
        for number, at in list(self._open.items()):
            rec = page.calls[at]
            if rec.number != number:
                del self._open[number]
            elif rec.left_ns:
                del self._open[number]
                self._replace(number, self._call(page, rec), rec.wait_ns / 1e9)
        while self._calls_read < h.n_calls:
            at = self._calls_read % CALLS
            rec = page.calls[at]
            self._calls_read += 1
            if rec.number != self._calls_read:
                continue
            call = self._call(page, rec)
            self._shares = self._shares or (rec.step > 0 and rec.elements > 1 and "float" in (call.dtype or ""))
            self.calls.append(call)
            if rec.group != NO_GROUP and call.seq is not None and call.site is not None:
                self.visits.add(call.group, call.site.key, call.seq)
            if rec.left_ns:
                self.closed_calls.append((call, rec.wait_ns / 1e9))
            else:
                self._open[self._calls_read] = at
                if len(self._open) > 512:
                    self._open.pop(next(iter(self._open)))
            if rec.group == NO_GROUP and self.text(rec.op) == "new_group":
                self.group_calls[call.group] = 1
                self.new_groups[call.group] = (int(rec.seq), unfold_ranks(self.text(rec.dtype)), call.site)

    def _replace(self, number: int, call: Call, waited_s: float) -> None:
        behind = self._calls_read - number
        if behind < len(self.calls):
            i = len(self.calls) - 1 - behind
            if self.calls[i].entered_s == call.entered_s:
                self.calls[i] = call
        self.closed_calls.append((call, waited_s))

    def _call(self, page: Page, rec: CallRecord) -> Call:
        op = self.text(rec.op)
        p2p = bool(rec.flags & P2P)
        group, seq, nth = "", rec.seq, None
        if rec.group == NO_GROUP:
            # its members are part of its name: a rank that skipped an earlier one has another number than the others
            members = self.text(rec.dtype)
            group = f"{op} {rec.seq}" + (f" of ranks {members}" if members else "")
            seq = 1
        else:
            group = self.group_key(page, rec.group)
            if op == "monitored_barrier":
                group, seq = f"{group} (monitored_barrier)", rec.nth
            elif p2p:
                seq, nth = None, rec.nth
        return Call(
            op=op,
            group=group,
            seq=seq,
            dtype=(self.text(rec.dtype) or None) if rec.group != NO_GROUP else None,
            shape=tuple(rec.shape[: rec.ndim]) if rec.ndim >= 0 else None,
            bytes=rec.bytes if rec.bytes >= 0 else None,
            received=rec.received if rec.received >= 0 else None,
            root=rec.peer if rec.flags & ROOTED else None,
            peer=rec.peer if p2p and rec.peer >= 0 else None,
            tag=rec.tag,
            nth=nth,
            site=self.site(rec.site),
            entered_s=self.s(rec.entered_ns),
            completed_s=self.s(rec.left_ns) if rec.left_ns and not rec.flags & FAILED_CALL else None,
            asynchronous=bool(rec.flags & ASYNC),
            other_thread=bool(rec.flags & OTHER_THREAD),
            on_device=bool(rec.flags & ON_DEVICE),
            left_s=self.s(rec.left_ns) if rec.flags & ON_DEVICE else None,
            even=bool(rec.flags & EVEN),
        )

    def _read_steps(self, page: Page, h: Header) -> None:
        if h.n_steps - self._steps_read > STEPS:
            if self._steps_read:  # before the first read, the monitor was still starting
                self.missed += h.n_steps - STEPS - self._steps_read
            self._steps_read = h.n_steps - STEPS
        while self._steps_read < h.n_steps:
            r = page.steps[self._steps_read % STEPS]
            self._steps_read += 1
            if r.number != self._steps_read:
                continue
            step_ms = (r.end_ns - r.start_ns) / 1e6
            parts = (r.data_ns / 1e6, r.forward_ns / 1e6, r.backward_ns / 1e6, r.optimizer_ns / 1e6)
            forward_wait_ms = r.forward_wait_ns / 1e6
            step = Step(
                step=r.step,
                end_s=(r.end_ns - self.start_ns) / 1e9,
                step_ms=step_ms,
                data_ms=parts[0],
                forward_ms=max(0.0, parts[1] - forward_wait_ms),
                backward_ms=parts[2],
                optimizer_ms=parts[3],
                wait_ms=min(r.wait_ns / 1e6, step_ms),
                other_ms=max(0.0, step_ms - sum(parts)),
                ready_s=self.s(r.ready_ns),
                batch=r.batch,
                samples=r.samples,
                loss=r.loss if r.loss_known else None,
                h2d_ms=r.h2d_ns / 1e6 if r.h2d_ns else None,
                forward_wait_ms=forward_wait_ms,
                arrived_s=self.s(r.arrived_ns),
            )
            self.steps.append(step)
            if self.warm_since_s is None and step.step >= WARM_STEPS:
                self.warm_since_s = step.end_s
            self.new_steps.append(step)

    def takes_memory(self) -> bool:
        """True if the memory of this rank or its device is growing; it is then sampled more often."""
        for course in (self.memory, self.device_memory):
            lately = [p for p in itertools.islice(reversed(course), MEMORY_SAMPLES) if course[-1][0] - p[0] <= MEMORY_S]
            if len(lately) > 1 and lately[0][1] - lately[-1][1] > MEMORY_RATE * (lately[0][0] - lately[-1][0]):
                return True
        return False

    def taken(self) -> tuple[list[Step], list[tuple[Call, float]]]:
        """Return the steps and closed calls since the last call of this method."""
        taken = self.new_steps, self.closed_calls
        self.new_steps, self.closed_calls = [], []
        return taken

    def scalars(self) -> list[ScalarRow]:
        """Return the values logged since the last call of this method."""
        page, out = self.page, []
        if page is None:
            return out
        h = page.header
        if h.n_scalars - self._scalars_read > SCALARS:
            self.missed_scalars += h.n_scalars - SCALARS - self._scalars_read
            self._scalars_read = h.n_scalars - SCALARS
        while self._scalars_read < h.n_scalars:
            rec = page.scalars[self._scalars_read % SCALARS]
            self._scalars_read += 1
            if rec.number == self._scalars_read:
                name = self.text(rec.name)
                out.append(ScalarRow(rank=h.rank, step=rec.step, name=name, value=rec.value, t_s=self.s(rec.t_ns)))
        return out

    def sample_site(self, idle: bool | None) -> None:
        """Count the main thread's newest site, unless it waits for other ranks there."""
        words = self.reader.words
        blocked, version = words[_BLOCKED], words[_VERSION]
        if version == self._sampled or (blocked != _NO and (blocked != _DDP or idle is not False)):
            return
        depth, phase_at = words[_DEPTH], words[_STACK_PHASE]
        if depth > STACK or phase_at >= len(_PHASES):
            return  # damaged: the next full poll drops this page
        offsets, phase = bytes(words[_STACK : _STACK + depth]), _PHASES[phase_at]
        stack = self.stack_of(offsets) if not version & 1 and version == words[_VERSION] else None
        if not stack:
            return
        self._sampled = version
        counts = self.site_counts.setdefault(phase, Counter())
        counts[stack[0]] += 1
        self.site_stacks[(phase, stack[0])] = stack
        if counts.total() > SITE_SAMPLES:  # forget slowly: the job changes
            for k in list(counts):
                counts[k] //= 2
                if not counts[k]:
                    del counts[k]
                    self.site_stacks.pop((phase, k), None)
