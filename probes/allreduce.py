"""all_reduce: every rank gets the sum of all ranks' buffers. DDP uses it for gradients.

S is one rank's buffer. A ring moves 2(n-1)/n of it over every link, so busbw = S/t x 2(n-1)/n.
"""

from __future__ import annotations

import torch.distributed as dist

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, InPlace, Segment

PROBE = Collective(
    "allreduce",
    lambda job, buffers, _root: dist.all_reduce(buffers.sent, group=job.group),
    lambda _job, pattern, _root, _start: [Segment(pattern.total())],
    in_place=InPlace.ALWAYS,
)

if __name__ == "__main__":
    run_script(PROBE)
