"""all_to_all: every rank sends a different part to every rank. Expert parallelism uses it.

S is one rank's whole buffer; it keeps 1/n of it, so busbw = S/t x (n-1)/n.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment


class AllToAll(Collective):
    name = "alltoall"
    summary = "every rank a different part to every rank: what expert parallelism does"
    op = "all_to_all"
    in_parts = True

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        return Buffers(job.empty(elements), job.empty(elements))

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        dist.all_to_all_single(b.received, b.sent, group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        part = elements // job.world_size
        mine = job.rank * part
        return [Segment(pattern.of(r), start=mine, count=part, source_rank=r) for r in range(job.world_size)]


PROBE = AllToAll()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
