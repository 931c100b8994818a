"""What is not finite ruins a training only where a step is made with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY, rows, start, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

SCRIPT = """
import time, torch
w = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([w], 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 40, enabled=SCALES)
for step in range(40):
    half = SCALES and step < 12
    loss = (w.half() * w.half()).sum().float() if half else (w * w).sum()
    if step in NAN:
        loss = loss * float("nan")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if step in DROPPED:
        continue
    scaler.step(optimizer)
    scaler.update()
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("nan", "dropped", "scales", "steps"),
    [
        # the batch of step 10 is thrown away; with that of step 30 a step is made, the 30th
        ("[10, 30]", "[10]", False, range(30, 31)),
        # a scaler drops the first steps until its scale fits; from 20 on it drops them all
        ("range(20, 40)", "[]", True, range(2, 21)),
    ],
    ids=["dropped by hand", "dropped by a scaler"],
)
def test_it_is_said_when_a_step_is_made_with_it_or_none_any_more(
    nan: str, dropped: str, scales: bool, steps: range, tmp_path: Path
) -> None:
    script, run = tmp_path / "script.py", tmp_path / "R"
    script.write_text(f"NAN, DROPPED, SCALES = {nan}, {dropped}, {scales}\n{SCRIPT}")
    one_rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, "-m", "distdiag.run", "--run-dir", "R", str(script)]
    with start(command, cwd=tmp_path, timeout=60, env=one_rank) as job:
        assert job.wait() == 0, job.tail()
        wait_for(lambda: rows(run, "SELECT 1 FROM meta WHERE key = 'ended_s'"), 30, "the monitor to close the run")
        kept = wait_for(lambda: rows(run, "SELECT json FROM finding WHERE kind = 'nonfinite'"), 10, "a finding")
    found = [json.loads(j) for (j,) in kept]
    assert [f["cause"] for f in found] == ["loss"] and found[0]["step"] in steps
