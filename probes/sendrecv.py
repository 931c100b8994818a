"""send and recv: each rank sends to its right neighbour while it receives from its left. Pipelines use it.

S is one message; busbw = S/t.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from distdiag.errors import DistdiagError
from distdiag.probekit.command.main import main
from distdiag.probekit.command.options import Options
from distdiag.probekit.measure.collective import Buffers, Collective, Ranks
from distdiag.probekit.measure.patterns import Pattern, Segment


class SendRecv(Collective):
    name = "sendrecv"
    summary = "each rank to its right neighbour while receiving from its left: pipeline traffic"
    op = "sendrecv"

    def check(self, options: Options) -> None:
        if options.device == "cuda" and options.backend == "gloo":
            raise DistdiagError("gloo has no send and recv of CUDA tensors", "--device cpu, or --backend nccl")

    def buffers(self, job: Ranks, elements: int, in_place: bool = False, root: int = 0) -> Buffers:
        return Buffers(job.empty(elements), job.empty(elements))

    def call(self, job: Ranks, b: Buffers, root: int = 0) -> None:
        right, left = (job.rank + 1) % job.world_size, (job.rank - 1) % job.world_size
        both = [
            dist.P2POp(dist.isend, b.sent, right, group=job.group),
            dist.P2POp(dist.irecv, b.received, left, group=job.group),
        ]
        for request in dist.batch_isend_irecv(both):
            request.wait()

    def expected(self, job: Ranks, pattern: Pattern, elements: int, root: int = 0) -> list[Segment]:
        left = (job.rank - 1) % job.world_size
        return [Segment(pattern.of(left), start=0, count=elements, source_rank=left)]


PROBE = SendRecv()

if __name__ == "__main__":
    sys.exit(main(name=PROBE.name))
