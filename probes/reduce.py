"""reduce: only the root gets the sum of all ranks' buffers.

S is one rank's buffer; busbw = S/t.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment


class Reduce(Collective):
    name = "reduce"
    summary = "the sum of all ranks' buffers on one rank"
    op = "reduce"
    rooted = True

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        buffer = job.empty(elements)
        return Buffers(sent=buffer, received=buffer)  # always in place

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        dist.reduce(b.sent, dst=root, group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        if job.rank != root:
            return []  # the other ranks' buffers are undefined afterwards
        return [Segment(pattern.total(), start=0, count=elements)]


PROBE = Reduce()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
