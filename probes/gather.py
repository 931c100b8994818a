"""gather: the root gets every rank's part.

S is what the root receives, n parts; (n-1)/n of it comes over the network, so busbw = S/t x (n-1)/n.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment


class Gather(Collective):
    name = "gather"
    summary = "every rank's part to one rank"
    op = "gather"
    in_parts = True
    rooted = True

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        received = job.empty(elements if job.rank == root else 0)
        parts = list(received.chunk(job.world_size)) if job.rank == root else []
        return Buffers(job.empty(elements // job.world_size), received, received_parts=parts)

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        dist.gather(b.sent, b.received_parts or None, dst=root, group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        part = elements // job.world_size
        if job.rank != root:
            return []
        return [Segment(pattern.of(r), start=0, count=part, source_rank=r) for r in range(job.world_size)]


PROBE = Gather()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
