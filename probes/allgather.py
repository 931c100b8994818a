"""all_gather: every rank gets every rank's part. FSDP uses it before forward and backward.

S is what one rank receives, n parts; busbw = S/t x (n-1)/n. Some tools count one rank's part as S instead; their numbers are n
times smaller.
"""

from __future__ import annotations

import sys

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment
from distdiag.probekit.measure.torch_names import all_gather_single


class AllGather(Collective):
    name = "allgather"
    summary = "every rank's part on every rank: what FSDP does before forward"
    op = "all_gather"
    in_parts = True
    in_place = True

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        received = job.empty(elements)
        part = elements // job.world_size
        own = received[job.rank * part : (job.rank + 1) * part]
        return Buffers(own if in_place else job.empty(part), received)

    def fill(self, job: Ranks, pattern: Pattern, b: Buffers, root: int = 0) -> None:
        b.received.zero_()  # first: in place, the sent part is inside it
        pattern.write(b.sent, job.rank)

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        all_gather_single(b.received, b.sent, group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        part = elements // job.world_size
        return [Segment(pattern.of(r), start=0, count=part, source_rank=r) for r in range(job.world_size)]


PROBE = AllGather()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
