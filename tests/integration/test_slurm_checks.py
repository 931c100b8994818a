"""The examples for Slurm, on a real one: a proved fault drains the node with its reason; what could not be measured does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import JOB_MARK, REPOSITORY, kill_marked, wait_for
from tests.slurm import missing, slurm

pytestmark = [pytest.mark.job, pytest.mark.timeout(240), pytest.mark.skipif(bool(missing()), reason=missing())]

NODE = socket.gethostname().partition(".")[0]
FAULT = "probe allreduce --min-bytes 4K --max-bytes 4K --inject corrupt:rank=1"
NO_GPU = "probe gpu"


@pytest.fixture
def cluster() -> Iterator[tuple[Path, dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        mark = uuid.uuid4().hex
        with slurm(Path(folder)) as variables:
            yield Path(folder), {**os.environ, **variables, JOB_MARK: mark}
        kill_marked(mark)  # checks that slurmd has started, and no longer ends


def example(folder: Path, env: dict[str, str], name: str, probe: str) -> Path:
    """Write an example with this environment's distdiag, and another probe."""
    command = folder / "distdiag"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m distdiag "$@"\n')
    command.chmod(0o755)
    text = (REPOSITORY / "examples" / "slurm" / name).read_text()
    before = ("distdiag=/opt/distdiag/bin/distdiag", "probe all", "#!/bin/sh\n", " --budget 20")
    after = (f"distdiag={command}", probe, f"#!/bin/sh\nexport SLURM_CONF={env['SLURM_CONF']} {JOB_MARK}={env[JOB_MARK]}\n", "")  # fmt: skip
    for old, new in zip(before, after, strict=True):
        assert old in text or old == " --budget 20"
        text = text.replace(old, new)
    script = folder / name
    script.write_text(text)
    script.chmod(0o755)
    return script


def reconfigured(env: dict[str, str], *lines: str) -> None:
    config = Path(env["SLURM_CONF"])
    config.write_text(config.read_text() + "\n".join(lines) + "\n")
    subprocess.run(["scontrol", "reconfigure"], env=env, check=True, timeout=30)


def node(env: dict[str, str]) -> str:
    return subprocess.run(
        ["scontrol", "show", "node", NODE], env=env, capture_output=True, text=True, timeout=30
    ).stdout


def test_a_prolog_lets_a_job_start_unless_a_fault_is_proved(cluster: tuple[Path, dict[str, str]]) -> None:
    folder, env = cluster
    prolog = example(folder, env, "prolog.sh", NO_GPU)
    reconfigured(env, f"Prolog={prolog}")
    done = subprocess.run(["srun", "-n", "1", "echo", "ran"], env=env, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr  # no GPU: nothing was measured
    assert "DRAIN" not in node(env)
    example(folder, env, "prolog.sh", FAULT)
    job = subprocess.Popen(["srun", "-n", "1", "echo", "ran"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: "DRAIN" in node(env), 90, "the node to be drained")
        assert "Reason=Prolog error" in node(env)
    finally:
        job.kill()
        job.communicate()
        subprocess.run(["scancel", "--me"], env=env, check=False)


def test_a_health_check_drains_a_node_with_its_line_as_the_reason(cluster: tuple[Path, dict[str, str]]) -> None:
    folder, env = cluster
    script = example(folder, env, "healthcheck.sh", NO_GPU)
    assert subprocess.run([script], env={}, cwd="/", timeout=90).returncode == 0
    assert "DRAIN" not in node(env)
    example(folder, env, "healthcheck.sh", FAULT)
    reconfigured(env, f"HealthCheckProgram={script}", "HealthCheckInterval=5", "HealthCheckNodeState=IDLE")
    wait_for(lambda: "DRAIN" in node(env), 120, "the node to be drained")
    assert "Reason=[distdiag] fail: allreduce: wrong values on rank 1" in node(env)
