"""The last steps before a rank's end are written, however it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import closed, launch, rows, wait_for

SCRIPT = """
import os, signal, sys, time
import torch
import distdiag
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once another rank has ended
handle = distdiag.attach()
handle.step()
while not os.path.exists("seen"):
    time.sleep(0.02)
for step in range(40):
    handle.step()
exec(("os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "sys.exit(3)")[int(os.environ["RANK"])])
"""


@pytest.mark.job
@pytest.mark.timeout(120)
def test_the_steps_just_before_the_end_are_written(tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", tmp_path / "R"
    script.write_text(SCRIPT)
    env = {"DISTDIAG_RUN_DIR": str(run)}
    with launch([script], nproc=3, cwd=tmp_path, timeout=90, env=env, fork_ranks=True) as job:
        wait_for(lambda: rows(run, "SELECT step FROM step") == [(1,)] * 3, 60, "the monitor to write step 1", job)
        (tmp_path / "seen").touch()
        job.wait()
        closed(run)
    written = rows(run, "SELECT rank, step FROM step ORDER BY rank, step")
    assert written == [(rank, step) for rank in range(3) for step in range(1, 42)]
