"""Base of the collective probes. Each probe script defines its buffers, its call and the expected result."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from distdiag.errors import DistdiagError, ExitCode
from distdiag.probekit.measure.ceilings import measure_ceilings
from distdiag.probekit.measure.patterns import Pattern, Segment, wrong_elements
from distdiag.probekit.measure.probe import Probe, Table
from distdiag.probekit.measure.sampling import Stamped, sample
from distdiag.probekit.verdict import collective_result
from distdiag.probekit.verdict.result import Result, WrongValues
from distdiag.terms.units import message_size

if TYPE_CHECKING:
    from distdiag.probekit.ranks.job import Job

_LEAST_SECONDS_A_SIZE = 0.05
_MOST_SECONDS_A_SIZE = 3.0  # more gives an interval that is narrower than the difference between two runs
_AS_MUCH_AGAIN_BYTES = 8 * 2**20


@dataclass(slots=True)
class Buffers:
    """Memory that one call reads and writes on this rank; the same memory if it works in place."""

    sent: torch.Tensor
    received: torch.Tensor
    sent_parts: list[torch.Tensor] = field(default_factory=list)  # views, for calls that take lists
    received_parts: list[torch.Tensor] = field(default_factory=list)


class Ranks(Protocol):
    """The ranks as an operation needs them: a `Job`, or a probe inside a training."""

    rank: int
    world_size: int
    group: Any
    device: torch.device
    dtype: torch.dtype

    def empty(self, elements: int) -> torch.Tensor: ...


class Collective(Probe):
    """A probe of one operation over a sweep of message sizes."""

    op: ClassVar[str]  # name of its `operations.Operation`
    in_parts: ClassVar[bool] = False  # each rank sends or receives 1/world_size of S
    rooted: ClassVar[bool] = False
    in_place: ClassVar[bool] = False  # a second form of the call, whose result overwrites what was sent

    @abc.abstractmethod
    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        """Return the buffers for S of `elements` elements."""

    @abc.abstractmethod
    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        """Issue one operation on `job.group`."""

    @abc.abstractmethod
    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        """Return the expected content of `received` on this rank, in order; [] if this rank gets nothing."""

    def fill(self, job: Ranks, pattern: Pattern, b: Buffers, root: int = 0) -> None:
        """Write this rank's integers into the buffer that is sent; clear the one that is received."""
        if b.received.data_ptr() != b.sent.data_ptr():
            b.received.zero_()
        pattern.write(b.sent, job.rank)

    def run(self, job: Job) -> Result | None:
        """Measure the ceilings, then every size (correctness, then time); return the result on rank 0."""
        began_s = time.monotonic()
        ceilings = measure_ceilings(job)
        pattern = Pattern(job.dtype, job.world_size)
        strided = self.strided_buffer_text(job, pattern)
        sizes = self.sizes(job)
        measured: list[tuple[int, Stamped, list[WrongValues]]] = []
        skipped: list[int] = []
        for i, size in enumerate(sizes):
            elements = size // torch.empty(0, dtype=job.dtype).element_size()
            left = job.agree([job.left_s()], f"{self.name}: is there time")[0]
            if left <= 0 and measured:
                skipped = sizes[i:]
                break
            # later sizes get what earlier ones left; 0.8: for checks and control traffic
            share = left * 0.8 * _weight(size) / sum(map(_weight, sizes[i:]))
            seconds = min(max(share, _LEAST_SECONDS_A_SIZE), _MOST_SECONDS_A_SIZE)
            checked_s = time.monotonic()
            wrong = self.wrong_values(job, pattern, elements)
            seconds = max(_LEAST_SECONDS_A_SIZE, seconds - (time.monotonic() - checked_s))
            b = self.buffers(job, elements)
            label = f"{self.name} {message_size(size)}" if size else self.name
            stamped = sample(job, self.timed_call(job, b), label, seconds, job.options.precision)
            if stamped is not None:
                measured.append((size, stamped, wrong))
            elif job.rank:
                measured.append((size, None, wrong))  # type: ignore[arg-type]  # only its length counts there
        if job.rank != 0:
            return None
        result = collective_result.build(self.name, self.op, job, measured, ceilings, skipped)
        if strided:
            result.notes.append(strided)
        result.elapsed_s = time.monotonic() - began_s
        return result

    def sizes(self, job: Job) -> list[int]:
        """Return the message sizes in bytes, ascending."""
        return job.options.sizes(job.world_size, self.in_parts)

    def timed_call(self, job: Job, b: Buffers) -> Callable[[], None]:
        """Return a function that does one operation and returns when it is complete."""
        require_contiguous(b.sent)
        require_contiguous(b.received)
        if job.device.type == "cpu":
            return lambda: self.call(job, b)

        def call_and_wait() -> None:
            self.call(job, b)
            job.synchronize()

        return call_and_wait

    # ------------------------------------------------------------------ correctness

    def cases(self, job: Job, elements: int) -> list[tuple[str, int, bool, int]]:
        """Return (name, elements, in place, root) of the calls that are checked at one size."""
        parts = job.world_size if self.in_parts else 1
        odd = elements - parts if elements // parts > 1 else elements + parts
        roots = [0]
        if self.rooted:
            injected = [i.rank for i in job.options.inject if i.kind == "corrupt"]
            roots = sorted({0, job.world_size - 1, *injected})
        cases: list[tuple[str, int, bool, int]] = []
        for root in roots:
            at = f", root {root}" if self.rooted else ""
            cases.append((f"exact size{at}", elements, False, root))
            cases.append((f"odd size{at}", odd, False, root))
        if self.in_place:
            cases.append(("in place", elements, True, 0))
            cases.append(("odd size in place", odd, True, 0))
        return cases

    def wrong_values(self, job: Job, pattern: Pattern, elements: int) -> list[WrongValues]:
        """Call the operation on known integers, compare every element on every rank, and return what is wrong."""
        mine: list[WrongValues] = []
        corrupt = job.injected("corrupt")
        for case, count, in_place, root in self.cases(job, elements):
            b = self.buffers(job, count, in_place, root)
            self.fill(job, pattern, b, root)
            with job.step(f"{self.name} {message_size(count * b.sent.element_size())}: checking {case}"):
                self.call(job, b, root)
                job.synchronize()
            offset = 0
            segments = self.expected(job, pattern, count, root)
            if corrupt and segments:
                b.received[len(b.received) // 2] += 1
            for segment in segments:
                found = wrong_elements(b.received, segment, offset)
                offset += segment.count
                if found:
                    mine.append(WrongValues(job.rank, found[0], found[1], case, segment.source_rank))
        everyone = job.gather_all(mine, f"{self.name}: collecting what was wrong")
        return [w for of_rank in everyone for w in of_rank]

    def strided_buffer_text(self, job: Job, pattern: Pattern) -> str | None:
        """Return a note if the backend accepts a strided tensor without an error and writes outside of it.

        torch documents contiguous tensors only. NCCL refuses others; gloo treats some of them as contiguous and writes the
        result into neighbouring memory.
        """
        if self.in_parts or self.op in ("barrier", "sendrecv"):
            return None
        wide = torch.zeros(64, 2, dtype=job.dtype, device=job.device)
        strided = wide[:, 0]
        values = torch.empty(64, dtype=job.dtype, device=job.device)
        pattern.write(values, job.rank)
        strided.copy_(values)
        b = Buffers(strided, strided)
        state = "right"
        with job.step(f"{self.name}: a strided buffer"):
            try:
                self.call(job, b)
                job.synchronize()
            except (ValueError, RuntimeError):
                state = "refused"  # before anything is sent, on every rank
        if state == "right":
            segments = self.expected(job, pattern, 64)
            wrong = any(wrong_elements(strided.contiguous(), s, 0) for s in segments)
            state = "wrong" if wrong or bool(wide[:, 1].any()) else "right"
        states = job.gather_all(state, f"{self.name}: collecting what became of a strided buffer")
        if "wrong" not in states:
            return None
        return f"{job.backend} takes a strided tensor in {self.op} without an error and gives wrong values: call .contiguous() first"

    # ------------------------------------------------------------------ for people

    def table(self, result: Result, ascii_only: bool = False) -> Table:
        return collective_result.table(result, ascii_only)

    def drawing(self, result: Result, ascii_only: bool = False) -> list[str]:
        return collective_result.explanation(self.op, result)

    def headline(self, result: Result) -> str:
        return collective_result.headline(result)


def _weight(size_bytes: int) -> float:
    """Return a size's share of the time, relative to a small one: large ones need more for the same number of samples."""
    return 1 + size_bytes / _AS_MUCH_AGAIN_BYTES


def require_contiguous(tensor: torch.Tensor) -> None:
    """Refuse a strided tensor, for which a backend may give wrong values without an error.

    Raises:
        DistdiagError: `tensor` is not contiguous.
    """
    if not tensor.is_contiguous():
        raise DistdiagError(
            f"the tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous",
            "call .contiguous() first: collectives read and write memory in one piece",
            ExitCode.USAGE,
        )
