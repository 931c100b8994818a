"""barrier: the time until all ranks have arrived and left. It moves no bytes, so it measures latency.

It is the cheapest first test: do all ranks respond, and is one of them always last?
"""

from __future__ import annotations

import torch.distributed as dist

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Collective, Part

PROBE = Collective(
    "barrier",
    lambda job, _buffers, _root: dist.barrier(group=job.group),
    lambda _job, _pattern, _root, _start: [],  # it transfers no values to check
    sends=Part.NOTHING,
    receives=Part.NOTHING,
)

if __name__ == "__main__":
    run_script(PROBE)
