"""reduce_scatter: the sum of all ranks' buffers, of which every rank keeps its part. FSDP uses it in backward.

S is one rank's whole input; busbw = S/t x (n-1)/n.
"""

from __future__ import annotations

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, InPlace, Part, Segment, reduce_scatter_single

PROBE = Collective(
    "reducescatter",
    lambda job, buffers, _root: reduce_scatter_single(buffers.received, buffers.sent, group=job.group),
    lambda _job, pattern, _root, start: [Segment(pattern.total(), start)],
    receives=Part.OWN,
    in_place=InPlace.ALSO,
)

if __name__ == "__main__":
    run_script(PROBE)
