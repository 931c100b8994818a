"""The collective probes: each script in probes/ declares its buffers, its call and the expected result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from distdiag.probekit.measure.ceilings import measure_ceilings
from distdiag.probekit.measure.patterns import Pattern, Segment, wrong_elements
from distdiag.probekit.measure.probe import Probe
from distdiag.probekit.measure.sampling import Stamped, sample
from distdiag.probekit.ranks.job import Job
from distdiag.probekit.verdict import collective_result
from distdiag.probekit.verdict.result import Result, WrongValues
from distdiag.terms.operations import family
from distdiag.terms.units import message_size

# the new names of torch 2.13 if there are any, which avoids a FutureWarning
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_LEAST_SECONDS_A_SIZE = 0.05
_MOST_SECONDS_A_SIZE = 3.0  # more gives an interval that is narrower than the difference between two runs
_AS_MUCH_AGAIN_BYTES = 8 * 2**20


class Part(Enum):
    """What of S, the size of a message, one rank sends or receives."""

    NOTHING = "nothing"
    OWN = "one of n equal parts"
    WHOLE = "all of it"
    AT_ROOT = "all of it on the root, nothing elsewhere"


class InPlace(Enum):
    """Whether the result may overwrite what was sent."""

    NEVER = "never"
    ALSO = "a second form of the call"
    ALWAYS = "always"


@dataclass(slots=True)
class Buffers:
    """Memory that one call reads and writes on this rank; the same memory if it works in place."""

    sent: torch.Tensor
    received: torch.Tensor
    parts: list[torch.Tensor] | None = None  # views of the root's buffer, for calls that take lists; None elsewhere


class Collective(Probe):
    """A probe of one operation over a sweep of message sizes; each script in probes/ declares one.

    Args:
        name: In the catalog; `terms.operations` has the rest of what is known of the operation.
        call: Issues one operation on `job.group`: `call(job, buffers, root)`.
        expected: Returns the content of `received` on this rank, equal parts in order; [] if this rank gets nothing:
            `expected(job, pattern, root, start)`, with `start` the position of this rank's part in S.
        sends, receives: Of S.
    """

    columns = collective_result.COLUMNS

    def __init__(
        self, name: str, call: Callable[[Any, Buffers, int], Any],
        expected: Callable[[Job, Pattern, int, int], list[Segment]],
        sends: Part = Part.WHOLE, receives: Part = Part.WHOLE, in_place: InPlace = InPlace.NEVER, messages: bool = False,
    ) -> None:  # fmt: skip
        operation = family(name)
        assert operation is not None
        self.name, self.op = name, operation.name
        self.rooted, self.moves, self.messages = operation.rooted, operation.factor is not None, messages
        self.call, self._expected, self.sends, self.receives, self.in_place = call, expected, sends, receives, in_place
        # each rank sends or receives 1/world_size of S, or a part of it from each other rank
        self.in_parts = Part.OWN in (sends, receives) or name == "alltoall"

    def buffers(self, job: Job, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        """Return the buffers for S of `elements` elements."""
        if self.in_place is InPlace.ALWAYS:
            both = job.empty(elements)
            return Buffers(both, both)
        part, at_root = elements // job.world_size, job.rank == root
        sizes = {Part.NOTHING: 0, Part.OWN: part, Part.WHOLE: elements, Part.AT_ROOT: elements if at_root else 0}
        sent, received = job.empty(sizes[self.sends]), job.empty(sizes[self.receives])
        if in_place:
            own = slice(job.rank * part, (job.rank + 1) * part)
            return Buffers(received[own], received) if self.sends is Part.OWN else Buffers(sent, sent[own])
        of_root = sent if self.sends is Part.AT_ROOT else received if self.receives is Part.AT_ROOT else None
        return Buffers(sent, received, [*of_root.chunk(job.world_size)] if of_root is not None and at_root else None)

    def expected(self, job: Job, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        """Return the expected content of `received` on this rank, in order; [] if this rank gets nothing."""
        part = elements // job.world_size
        found = self._expected(job, pattern, root, job.rank * part)
        received = part if self.receives is Part.OWN else elements
        return [replace(segment, count=received // len(found)) for segment in found]

    def run(self, job: Job) -> Result | None:
        """Measure the ceilings, then every size (correctness, then time); return the result on rank 0."""
        measure_ceilings(job)
        pattern = Pattern(job.dtype, job.world_size)
        sizes = self.sizes(job)
        measured: list[tuple[int, Stamped, list[WrongValues]]] = []
        skipped: list[int] = []
        for i, size in enumerate(sizes):
            elements = size // job.dtype.itemsize
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
            buffers = self.buffers(job, elements)
            label = f"{self.name} {message_size(size)}" if size else self.name
            stamped = sample(job, self.timed_call(job, buffers), label, seconds, job.options.precision)
            if stamped is not None:
                measured.append((size, stamped, wrong))
            elif job.rank:
                measured.append((size, None, wrong))  # type: ignore[arg-type]  # only its length counts there
        if job.rank != 0:
            return None
        return collective_result.build(self.name, self.op, job, measured, skipped)

    def sizes(self, job: Job) -> list[int]:
        return job.options.sizes(job.world_size, self.in_parts) if self.moves else [0]

    def timed_call(self, job: Job, buffers: Buffers) -> Callable[[], None]:
        """Return a function that does one operation and returns when it is complete."""

        def call_and_wait() -> None:
            self.call(job, buffers, 0)
            job.synchronize()

        return call_and_wait

    def cases(self, job: Job, elements: int) -> list[tuple[str, int, bool, int]]:
        """Return (name, elements, in place, root) of the calls that are checked at one size."""
        if not self.moves:
            return []
        parts = job.world_size if self.in_parts else 1
        odd = elements - parts if elements // parts > 1 else elements + parts
        injected = [i.rank for i in job.options.inject if i.kind == "corrupt"]
        cases: list[tuple[str, int, bool, int]] = []
        for root in sorted({0, job.world_size - 1, *injected}) if self.rooted else [0]:
            at = f", root {root}" if self.rooted else ""
            cases += [(f"exact size{at}", elements, False, root), (f"odd size{at}", odd, False, root)]
        if self.in_place is InPlace.ALSO:
            cases += [("in place", elements, True, 0), ("odd size in place", odd, True, 0)]
        return cases

    def wrong_here(
        self, job: Job, pattern: Pattern, elements: int, case: str, in_place: bool, root: int, corrupt: bool
    ) -> list[WrongValues]:
        """Call the operation on known integers, compare every element on this rank, and return what is wrong."""
        buffers = self.buffers(job, elements, in_place, root)
        if buffers.received is not buffers.sent:
            buffers.received.zero_()  # first: in place, one is inside the other
        pattern.write(buffers.sent, job.rank)
        self.call(job, buffers, root)
        job.synchronize()
        segments, offset, wrong = self.expected(job, pattern, elements, root), 0, []
        if corrupt and segments:
            buffers.received[len(buffers.received) // 2] += 1
        for segment in segments:
            if found := wrong_elements(buffers.received, segment, offset):
                wrong.append(WrongValues(job.rank, *found, case, segment.source_rank))
            offset += segment.count
        return wrong

    def wrong_values(self, job: Job, pattern: Pattern, elements: int) -> list[WrongValues]:
        """Check all cases at one size; return what is wrong on any rank, on every rank."""
        mine: list[WrongValues] = []
        corrupt = job.injected("corrupt") is not None
        for case, count, in_place, root in self.cases(job, elements):
            with job.step(f"{self.name} {message_size(count * job.dtype.itemsize)}: checking {case}"):
                mine += self.wrong_here(job, pattern, count, case, in_place, root, corrupt)
        everyone = job.gather_all(mine, f"{self.name}: collecting what was wrong")
        return [w for of_rank in everyone for w in of_rank]

    def drawing(self, result: Result) -> list[str]:
        return collective_result.explanation(self.op, result)

    def headline(self, result: Result) -> str:
        return collective_result.headline(result)


def exchange(group: Any, sent: tuple[torch.Tensor, int], received: tuple[torch.Tensor, int]) -> None:
    both = [dist.P2POp(dist.isend, *sent, group=group), dist.P2POp(dist.irecv, *received, group=group)]
    for request in dist.batch_isend_irecv(both):
        request.wait()


def _weight(size_bytes: int) -> float:
    """Return a size's share of the time, relative to a small one: large ones need more for the same number of samples."""
    return 1 + size_bytes / _AS_MUCH_AGAIN_BYTES
