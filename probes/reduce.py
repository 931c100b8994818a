"""reduce: only the root gets the sum of all ranks' buffers.

S is one rank's buffer; busbw = S/t.
"""

from __future__ import annotations

import torch.distributed as dist

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, InPlace, Segment

PROBE = Collective(
    "reduce",
    lambda job, buffers, root: dist.reduce(buffers.sent, dst=root, group=job.group),
    # the other ranks' buffers are undefined afterwards
    lambda job, pattern, root, _start: [Segment(pattern.total())] if job.rank == root else [],
    in_place=InPlace.ALWAYS,
)

if __name__ == "__main__":
    run_script(PROBE)
