"""broadcast: the root's buffer to all ranks. DDP uses it to copy parameters and buffers from rank 0.

S is the buffer; busbw = S/t: every link carries all of it once.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment


class Broadcast(Collective):
    name = "broadcast"
    summary = "one rank's buffer to all ranks"
    op = "broadcast"
    rooted = True

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        buffer = job.empty(elements)
        return Buffers(sent=buffer, received=buffer)  # always in place

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        dist.broadcast(b.sent, src=root, group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        return [Segment(pattern.of(root), start=0, count=elements)]


PROBE = Broadcast()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
