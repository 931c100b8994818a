"""all_reduce: every rank gets the sum of all ranks' buffers. DDP uses it for gradients.

S is one rank's buffer. A ring moves 2(n-1)/n of it over every link, so busbw = S/t x 2(n-1)/n.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment


class AllReduce(Collective):
    name = "allreduce"
    summary = "the sum of all ranks' buffers on every rank: what DDP does with gradients"
    op = "all_reduce"

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        buffer = job.empty(elements)
        return Buffers(sent=buffer, received=buffer)  # always in place

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        dist.all_reduce(b.sent, group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        return [Segment(pattern.total(), start=0, count=elements)]


PROBE = AllReduce()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
