"""barrier: the time until all ranks have arrived and left. It moves no bytes, so it measures latency.

It is the cheapest first test: do all ranks respond, and is one of them always last?
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from distdiag.probekit.command.main import main
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment
from distdiag.probekit.ranks.job import Job


class Barrier(Collective):
    name = "barrier"
    summary = "time until all ranks have arrived and left: pure latency"
    op = "barrier"

    def sizes(self, job: Job) -> list[int]:
        return [0]

    def cases(self, job: Job, elements: int) -> list[tuple[str, int, bool, int]]:
        return []  # it transfers no values to check

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        return Buffers(job.empty(0), job.empty(0))

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        dist.barrier(group=job.group)

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        return []


PROBE = Barrier()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
