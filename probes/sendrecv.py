"""send and recv: each rank sends to its right neighbour while it receives from its left. Pipelines use it.

S is one message; busbw = S/t.
"""

from __future__ import annotations

from distdiag.probekit.command.main import run_script
from distdiag.probekit.measure.collective import Buffers, Collective, Segment, exchange
from distdiag.probekit.ranks.job import Job


def _left(job: Job) -> int:
    return (job.rank - 1) % job.world_size


def _call(job: Job, buffers: Buffers, _root: int) -> None:
    exchange(job.group, (buffers.sent, (job.rank + 1) % job.world_size), (buffers.received, _left(job)))


PROBE = Collective(
    "sendrecv",
    _call,
    lambda job, pattern, _root, _start: [Segment(pattern.of(_left(job)), source_rank=_left(job))],
    messages=True,
)

if __name__ == "__main__":
    run_script(PROBE)
