"""What a rank waits for in collectives of its optimizer is no time of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import closed, launch, rows

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

# each rank steps its own parameters and sends them to the other; those of rank 1 take longer
SCRIPT = """
import time
import torch, torch.distributed as dist

class Owned(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        if dist.get_rank() == 1:
            time.sleep(0.03)
        p = self.param_groups[0]["params"][0]
        works = [dist.broadcast(x, src, async_op=True) for src, x in enumerate(p.data)]
        for work in works:
            work.wait()

dist.init_process_group("gloo")
p = torch.nn.Parameter(torch.ones(2, 4))
optimizer = Owned([p], 0.01)
for step in range(30):
    p.pow(2).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_rank_that_waits_in_its_optimizer_step_has_a_short_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with launch(
        ["-m", "distdiag.run", "--run-dir", "R", "script.py"], cwd=tmp_path, nproc=2, timeout=60, fork_ranks=True
    ) as job:
        assert job.wait() == 0, job.tail()
        closed(tmp_path / "R")
    means = "SELECT avg(optimizer_ms), avg(wait_ms) FROM step WHERE step > 5 GROUP BY rank ORDER BY rank"
    (own_ms, waited_ms), (late_ms, _) = rows(tmp_path / "R", means)
    assert late_ms > 25 and own_ms < late_ms / 3 and waited_ms > late_ms / 2
