"""reduce_scatter: the sum of all ranks' buffers, of which every rank keeps its part. FSDP uses it in backward.

S is one rank's whole input; busbw = S/t x (n-1)/n.
"""

from __future__ import annotations

import sys

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment
from distdiag.probekit.measure.torch_names import reduce_scatter_single


class ReduceScatter(Collective):
    name = "reducescatter"
    summary = "the sum, each rank keeping its part: what FSDP does in backward"
    op = "reduce_scatter"
    in_parts = True
    in_place = True

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        sent = job.empty(elements)
        part = elements // job.world_size
        own = sent[job.rank * part : (job.rank + 1) * part]
        return Buffers(sent, own if in_place else job.empty(part))

    def fill(self, job: Ranks, pattern: Pattern, b: Buffers, root: int = 0) -> None:
        b.received.zero_()  # first: in place, it is inside the sent buffer
        pattern.write(b.sent, job.rank)

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        reduce_scatter_single(b.received, b.sent, group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        part = elements // job.world_size
        return [Segment(pattern.total(), start=job.rank * part, count=part)]


PROBE = ReduceScatter()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
