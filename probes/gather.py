"""gather: the root gets every rank's part.

S is what the root receives, n parts; (n-1)/n of it comes over the network, so busbw = S/t x (n-1)/n.
"""

from __future__ import annotations

import torch.distributed as dist

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, Part, Segment

PROBE = Collective(
    "gather",
    lambda job, buffers, root: dist.gather(buffers.sent, buffers.parts, dst=root, group=job.group),
    lambda job, pattern, root, _start: (
        [Segment(pattern.of(r), source_rank=r) for r in range(job.world_size)] if job.rank == root else []
    ),
    sends=Part.OWN,
    receives=Part.AT_ROOT,
)

if __name__ == "__main__":
    run_script(PROBE)
