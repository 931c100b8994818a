"""scatter: the root sends a different part to every rank.

S is what the root sends, n parts; (n-1)/n of it goes over the network, so busbw = S/t x (n-1)/n.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment


class Scatter(Collective):
    name = "scatter"
    summary = "one rank's parts to every rank"
    op = "scatter"
    in_parts = True
    rooted = True

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        sent = job.empty(elements if job.rank == root else 0)
        parts = list(sent.chunk(job.world_size)) if job.rank == root else []
        return Buffers(sent, job.empty(elements // job.world_size), sent_parts=parts)

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        dist.scatter(b.received, b.sent_parts or None, src=root, group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        part = elements // job.world_size
        return [Segment(pattern.of(root), start=job.rank * part, count=part, source_rank=root)]


PROBE = Scatter()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
