"""scatter: the root sends a different part to every rank.

S is what the root sends, n parts; (n-1)/n of it goes over the network, so busbw = S/t x (n-1)/n.
"""

from __future__ import annotations

import torch.distributed as dist

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, Part, Segment

PROBE = Collective(
    "scatter",
    lambda job, buffers, root: dist.scatter(buffers.received, buffers.parts, src=root, group=job.group),
    lambda _job, pattern, root, start: [Segment(pattern.of(root), start, source_rank=root)],
    sends=Part.AT_ROOT,
    receives=Part.OWN,
)

if __name__ == "__main__":
    run_script(PROBE)
