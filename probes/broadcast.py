"""broadcast: the root's buffer to all ranks. DDP uses it to copy parameters and buffers from rank 0.

S is the buffer; busbw = S/t: every link carries all of it once.
"""

from __future__ import annotations

import torch.distributed as dist

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, InPlace, Segment

PROBE = Collective(
    "broadcast",
    lambda job, buffers, root: dist.broadcast(buffers.sent, src=root, group=job.group),
    lambda _job, pattern, root, _start: [Segment(pattern.of(root))],
    in_place=InPlace.ALWAYS,
)

if __name__ == "__main__":
    run_script(PROBE)
