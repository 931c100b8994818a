"""all_to_all: every rank sends a different part to every rank. Expert parallelism uses it.

S is one rank's whole buffer; it keeps 1/n of it, so busbw = S/t x (n-1)/n.
"""

from __future__ import annotations

import torch.distributed as dist

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, Segment

PROBE = Collective(
    "alltoall",
    lambda job, buffers, _root: dist.all_to_all_single(buffers.received, buffers.sent, group=job.group),
    lambda job, pattern, _root, start: [Segment(pattern.of(r), start, source_rank=r) for r in range(job.world_size)],
)

if __name__ == "__main__":
    run_script(PROBE)
