"""Follow a rank's page over time: read its rings into the types of a snapshot."""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from distdiag import source_files
from distdiag.diagnosis.model.snapshot import WARM_STEPS, Call, Sample, Site, Step
from distdiag.diagnosis.model.visits import Visits
from distdiag.diagnosis.step_times import LIMITS
from distdiag.monitor.ranks.ddp_times import DdpTimes
from distdiag.monitor.ranks.decode import PageDecoder, Ring
from distdiag.page import layout
from distdiag.page.layout import CALLS, NO_GROUP, SAMPLES, SCALARS, STACK, STEPS, Blocked, Phase, SampleKind, word
from distdiag.store.rows import ScalarRow
from distdiag.terms.ranks import unfold_ranks

CALLS_KEPT, STEPS_KEPT = 128, 64
COMPUTES_NS = 500_000_000  # a main thread that uses the CPU counts as computing for this long
LONG_NS = 400_000_000  # a wait that ranks that run well rarely have
_SINCE, _BLOCKED, _BLOCKED_SINCE = map(word, ("phase_since_ns", "blocked", "blocked_since_ns"))
_N_CALLS, _N_STEPS, _N_SAMPLES, _N_SCALARS = map(word, ("n_calls", "n_steps", "n_samples", "n_scalars"))
_VERSION, _DEPTH, _STACK, _STACK_PHASE = map(word, ("stack_version", "stack_depth", "stack", "stack_phase"))
_NO, _DDP = _MAY_COMPUTE = int(Blocked.NO), int(Blocked.DDP)
# innermost Python frames of calls in which C++ waits for a collective
_CPP_WAITS = ("_functional_collectives.", "_ops.")
# a user's line that waits for the future of a collective, which has no frame in Python: `work.get_future().wait()`
_FUTURE = re.compile(r"(?:\bfut\w*|get_future\(\)|(?:collect|wait)_all\(.*\))\.(?:wait|value)\(|\bfutures\.wait_all\(")
_PHASES = [p.name.lower() for p in Phase]
_PROGRESS = (
    "n_calls", "n_steps", "step", "blocked", "blocked_at", "micro_steps", "phase", "phase_since_ns", "n_store",
)  # fmt: skip
_progress = attrgetter(*_PROGRESS)
ROUTINE_SAMPLES = frozenset(
    {SampleKind.PARAMETERS, SampleKind.BUFFERS, SampleKind.REDUCED, SampleKind.AVERAGED, SampleKind.LEARNING_RATE, SampleKind.EVAL_MODE, SampleKind.NOT_STEPPED, SampleKind.STATE, SampleKind.NO_GRADIENTS,
     SampleKind.OUTSIDE_DDP, SampleKind.GRADIENTS, SampleKind.UNTRAINED, SampleKind.LAYERS, SampleKind.HOOKS_LOST,
     SampleKind.OPTIMIZER_STEPS, SampleKind.NOT_WRITTEN_BACK, SampleKind.OUTSIDE_FSDP, SampleKind.FROZEN}
)  # fmt: skip
SITE_SAMPLES = 400
LOGGED_NAMES, LOGGED_KEPT = 16, 32
FIRST = 16  # samples from before the first step: one of the parameters, and at most eight of classes of layers


class RankHistory:
    def __init__(self, decoder: PageDecoder) -> None:
        self._decoder, self._reader = decoder, decoder.reader
        rings = ("calls", "steps", "samples", "scalars", "ddp_times")
        self._calls, self._steps, self._samples, self._scalars, times = (Ring(decoder, name) for name in rings)
        self.calls: deque[Call] = deque(maxlen=CALLS_KEPT)
        self._open: dict[int, int] = {}
        self.steps: deque[Step] = deque(maxlen=STEPS_KEPT)
        self.ddp_times = DdpTimes(decoder, times)
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.first: deque[Sample] = deque(maxlen=FIRST)  # from before the first step: how the replicas began
        self._news = b""
        self._samples_checked = 0
        self._sampled = 0  # version of the stack that was counted last
        self._warm = False
        self.site_counts: dict[str, Counter[Site]] = {}
        self.site_stacks: dict[tuple[str, Site], tuple[Site, ...]] = {}
        self.worker_sites: Counter[Site] = Counter()  # of its loaders' workers when it waited for them for long
        self.visits = Visits()
        self._shares = False  # it has exchanged floating-point tensors with others while it trained
        self.group_calls: dict[str, int] = {}
        # calls of new_group by name: number, members, call site
        self.new_groups: dict[str, tuple[int, tuple[int, ...], Site | None]] = {}
        self.still_since_s: float | None = None  # since when `still_mark` is the same: the host has made no progress
        self.still_mark: tuple[Any, ...] = ()
        self.new_steps: list[Step] = []  # not taken yet
        self.closed_calls: list[tuple[Call, float]] = []  # not taken yet, with the host's wait in seconds
        self.warm_since_s: float | None = None
        self.logged: dict[str, deque[tuple[int, float]]] = {}  # of handle.log(), by name

    @property
    def missed(self) -> int:
        """Return how many records were overwritten before they were read; counts of calls are exact nevertheless."""
        return self._calls.missed + self._steps.missed + self._scalars.missed

    # -- reading ----------------------------------------------------------------------------------

    def waits(self, now_ns: int) -> bool:
        """True if the host has been waiting in a collective for longer than ranks that run well usually do."""
        words = self._reader.words
        return bool(words[_BLOCKED]) and now_ns - words[_BLOCKED_SINCE] > LONG_NS

    def moves_on(self, now_ns: int, idle: Callable[[], bool | None]) -> bool:
        """True if the main thread cannot be waiting for another rank, and its records can be read later.

        It has just changed its phase or wait, or it uses the CPU (`idle` is called only if needed). The latter may be a spinning wait
        for a GPU, so it counts only for a while.
        """
        words = self._reader.words
        still_ns = now_ns - max(words[_SINCE], words[_BLOCKED_SINCE])
        if still_ns >= layout.STILL_NS and (
            still_ns >= COMPUTES_NS or words[_BLOCKED] not in _MAY_COMPUTE or idle() is not False
        ):
            return False
        return (
            words[_N_CALLS] - self._calls.read < CALLS // 4
            and words[_N_STEPS] - self._steps.read < STEPS // 2
            and words[_N_SCALARS] - self._scalars.read < SCALARS // 2
            and words[layout.NEWS].tobytes() == self._news
            and (words[_N_SAMPLES] == self._samples_checked or self._samples_can_wait(words[_N_SAMPLES]))
        )

    def _samples_can_wait(self, samples: int) -> bool:
        """True if all new samples are of routine kinds, and the ring has room for more."""
        first, self._samples_checked = max(self._samples_checked, self._samples.read), samples
        routine = ROUTINE_SAMPLES.issuperset(self._reader.sample_kinds(first, samples))
        return routine and samples - self._samples.read < SAMPLES // 4

    def refresh(self, now_s: float) -> None:
        """Read the page and the new records in its rings."""
        self._news = self._reader.words[layout.NEWS].tobytes()  # first: what is written meanwhile counts as news
        page = self._reader.read(-1 if self._open else self._calls.read)
        h = page.header
        self._read_calls()
        self._read_steps()
        self.ddp_times.read(itertools.chain(reversed(self.new_steps), reversed(self.steps)))
        self._read_samples()
        mark = (
            *_progress(h),
            *(page.groups[i].enqueued for i in range(h.n_groups)),
            *(page.loaders[i].batches for i in range(h.n_loaders)),
        )
        if mark != self.still_mark:
            self.still_mark = mark
            self.still_since_s = now_s

    def forget_progress(self) -> None:
        """Forget when the host made progress: the time zero of the run has changed."""
        self.still_since_s, self.still_mark = None, ()

    def _read_samples(self) -> None:
        page, h = self._decoder, self._decoder.header
        for record in self._samples.new():
            kind = SampleKind(record.kind).name.lower() if record.kind in list(SampleKind) else "?"
            if record.kind in (SampleKind.REDUCED, SampleKind.AVERAGED) and record.value:
                self._shares = True
            at, t_s = page.site(record.site), page.s(record.t_ns)
            alone = h.world_size > 1 and not h.n_models and not self._shares
            sample = Sample(kind, record.step, record.value, record.key, page.text(record.name), at, t_s, alone)
            (self.samples if record.step or kind not in ("parameters", "layers") else self.first).append(sample)

    def _read_calls(self) -> None:
        records, missed = self._decoder.page.calls, self._calls.missed
        for number, at in list(self._open.items()):
            record = records[at]
            if record.number != number:
                del self._open[number]
            elif record.left_ns:
                del self._open[number]
                self._replace(number, self.call(record), record.wait_ns / 1e9)
        for record in self._calls.new():
            if missed != self._calls.missed:
                missed = self._calls.missed
                self.visits.forget()
            call = self.call(record)
            self._shares = self._shares or (record.step > 0 and record.elements > 1 and "float" in (call.dtype or ""))
            self.calls.append(call)
            if record.group != NO_GROUP and call.seq is not None and call.site is not None:
                self.visits.add(call.group, call.site.key, call.seq)
            if record.left_ns:
                self.closed_calls.append((call, record.wait_ns / 1e9))
            else:
                self._open[record.number] = (record.number - 1) % CALLS
                if len(self._open) > 512:
                    self._open.pop(next(iter(self._open)))
            if record.group == NO_GROUP and call.op == "new_group":
                members = unfold_ranks(self._decoder.text(record.dtype))
                self.group_calls[call.group] = 1
                self.new_groups[call.group] = (int(record.seq), members, call.site)

    def _replace(self, number: int, call: Call, waited_s: float) -> None:
        behind = self._calls.read - number
        if behind < len(self.calls):
            i = len(self.calls) - 1 - behind
            if self.calls[i].entered_s == call.entered_s:
                self.calls[i] = call
        self.closed_calls.append((call, waited_s))

    def call(self, rec: layout.CallRecord) -> Call:
        page, flags = self._decoder, rec.flags
        op, dtype, site = page.text(rec.op), page.text(rec.dtype) or None, page.site(rec.site)
        entered_s, left_s = page.s(rec.entered_ns), page.s(rec.left_ns)
        p2p, on_device = bool(flags & layout.P2P), bool(flags & layout.ON_DEVICE)
        seq, nth = rec.seq, None
        if rec.group == NO_GROUP:
            # its members are part of its name: a rank that skipped an earlier one has another number than the others
            group = f"{op} {rec.seq}" + (f" of ranks {dtype}" if dtype else "")
            seq, dtype = 1, None
        else:
            group = page.group_key(rec.group)
            if op == "monitored_barrier":
                group, seq = f"{group} (monitored_barrier)", rec.nth
            elif p2p:
                seq, nth = None, rec.nth
        return Call(
            op=op,
            group=group,
            seq=seq,
            dtype=dtype,
            shape=tuple(rec.shape[: rec.ndim]) if rec.ndim >= 0 else None,
            bytes=rec.bytes if rec.bytes >= 0 else None,
            received=rec.received if rec.received >= 0 else None,
            root=rec.peer if flags & layout.ROOTED else None,
            peer=rec.peer if p2p and rec.peer >= 0 else None,
            tag=rec.tag,
            nth=nth,
            site=site,
            entered_s=entered_s,
            failed=bool(flags & layout.FAILED_CALL),
            completed_s=None if flags & layout.FAILED_CALL else left_s,
            asynchronous=bool(flags & layout.ASYNC),
            waited_s=rec.wait_ns / 1e9 if p2p or flags & layout.ASYNC else 0.0,
            other_thread=bool(flags & layout.OTHER_THREAD),
            on_device=on_device,
            left_s=left_s if on_device else None,
            even=bool(flags & layout.EVEN),
        )

    def _read_steps(self) -> None:
        first = not self._steps.read
        for r in self._steps.new():
            step_ms = (r.end_ns - r.start_ns) / 1e6
            parts = (r.data_ns / 1e6, r.forward_ns / 1e6, r.backward_ns / 1e6, r.optimizer_ns / 1e6)
            forward_wait_ms, optimizer_wait_ms = r.forward_wait_ns / 1e6, r.optimizer_wait_ns / 1e6
            step = Step(
                step=r.step,
                end_s=(r.end_ns - self._decoder.start_ns) / 1e9,
                step_ms=step_ms,
                data_ms=parts[0],
                forward_ms=max(0.0, parts[1] - forward_wait_ms),
                backward_ms=parts[2],
                optimizer_ms=max(0.0, parts[3] - optimizer_wait_ms),
                wait_ms=min(r.wait_ns / 1e6, step_ms),
                other_ms=max(0.0, step_ms - sum(parts)),
                ready_s=self._decoder.s(r.ready_ns),
                batch=r.batch,
                samples=r.samples,
                loss=r.loss if r.loss_known else None,
                h2d_ms=r.h2d_ns / 1e6 if r.h2d_ns else None,
                forward_wait_ms=forward_wait_ms,
                arrived_s=self._decoder.s(r.arrived_ns),
                epoch=r.epoch if r.epoch >= 0 else None,
                optimizer_wait_ms=optimizer_wait_ms,
                elements=r.elements,
            )
            self.steps.append(step)
            if not self._warm and step.step > LIMITS.warm_up:
                self._warm = True
                # a first step of many seconds is sampled more often than those that are judged
                self.site_counts = {phase: n for phase, n in self.site_counts.items() if phase == "init"}
            if self.warm_since_s is None and step.step >= WARM_STEPS:
                self.warm_since_s = step.end_s
            self.new_steps.append(step)
        if first:
            self._steps.missed = 0  # the monitor was still starting

    def in_backend(self) -> str:
        """Return the backend's Python function that the main thread is in; "" if it is in none, or has moved since the sample."""
        page, since_s = self._decoder, self.still_since_s
        name = page.text(page.header.raw_innermost)
        old = since_s is None or (page.s(page.header.stack_ns) or 0.0) < since_s
        return name.removeprefix(layout.BACKEND_FRAME) if name.startswith(layout.BACKEND_FRAME) and not old else ""

    def in_cpp_wait(self) -> bool:
        """True if the last sample of the main thread is in a call in which C++ waits for a collective: torch's, or a future's."""
        raw = self._decoder.text(self._decoder.header.raw_innermost)
        site = next(iter(self._decoder.stack()), None)
        if raw.startswith(_CPP_WAITS) or site is None:
            return raw.startswith(_CPP_WAITS)
        own = raw == f"{Path(site.file).stem}.{site.function}"
        return own and _FUTURE.search(source_files.line(site.file, site.line)) is not None

    def taken(self) -> tuple[list[Step], list[tuple[Call, float]]]:
        """Return the steps and closed calls since the last call of this method."""
        taken = self.new_steps, self.closed_calls
        self.new_steps, self.closed_calls = [], []
        return taken

    def scalars(self) -> list[ScalarRow]:
        """Return the values logged since the last call of this method."""
        page, rank = self._decoder, self._decoder.header.rank
        rows = [
            ScalarRow(rank=rank, step=r.step, name=page.text(r.name), value=r.value, t_s=page.s(r.t_ns))
            for r in self._scalars.new()
        ]
        for row in rows:
            known = row.name in self.logged or len(self.logged) < LOGGED_NAMES
            if known and row.step is not None and row.value is not None:
                self.logged.setdefault(row.name, deque(maxlen=LOGGED_KEPT)).append((row.step, row.value))
        return rows

    def sample_site(self, idle: bool | None) -> None:
        """Count the main thread's newest site, unless it waits for other ranks there."""
        words = self._reader.words
        blocked, version = words[_BLOCKED], words[_VERSION]
        if version == self._sampled or (blocked != _NO and (blocked != _DDP or idle is not False)):
            return
        depth, phase_at = words[_DEPTH], words[_STACK_PHASE]
        if depth > STACK or phase_at >= len(_PHASES):
            return  # damaged: the next full poll drops this page
        offsets, phase = bytes(words[_STACK : _STACK + depth]), _PHASES[phase_at]
        stack = self._decoder.stack_of(offsets) if not version & 1 and version == words[_VERSION] else None
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

    def phases(self) -> dict[str, Any]:
        """Return the sampled sites and a stack of each phase, as `RankState` has them."""
        newest = {phase: counts.most_common(3) for phase, counts in self.site_counts.items()}
        return {
            "worker_sites": tuple(self.worker_sites.most_common(3)),
            "phase_sites": {phase: tuple(sites) for phase, sites in newest.items()},
            "phase_stacks": {phase: self.site_stacks[phase, sites[0][0]] for phase, sites in newest.items() if sites},
        }
