"""all_gather: every rank gets every rank's part. FSDP uses it before forward and backward.

S is what one rank receives, n parts; busbw = S/t x (n-1)/n. Some tools count one rank's part as S instead; their numbers are n
times smaller.
"""

from __future__ import annotations

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, InPlace, Part, Segment, all_gather_single

PROBE = Collective(
    "allgather",
    lambda job, buffers, _root: all_gather_single(buffers.received, buffers.sent, group=job.group),
    lambda job, pattern, _root, _start: [Segment(pattern.of(r), source_rank=r) for r in range(job.world_size)],
    sends=Part.OWN,
    in_place=InPlace.ALSO,
)

if __name__ == "__main__":
    run_script(PROBE)
