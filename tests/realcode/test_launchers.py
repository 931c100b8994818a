"""DISTDIAG=1 under launchers that are no part of torch: one run with all ranks, the rank and line of a hang, equal results.

They run in the environment of `make realcode`: `.venv-realcode/bin/python -m pytest tests/realcode`. Elsewhere each is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs import Job, closed, free_port, rows, start, wait_for

pytestmark = [pytest.mark.job, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent / "launched"
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
WAYS = {  # module that it needs, what comes before the script, the script, its arguments
    "accelerate": ("accelerate", ACCELERATE, "with_accelerate.py", []),
    "lightning_ddp": ("lightning", [], "with_lightning.py", ["ddp"]),
    "lightning_ddp_spawn": ("lightning", [], "with_lightning.py", ["ddp_spawn"]),
    "ray": ("ray.train", [], "with_ray.py", []),
    "deepspeed": (
        "deepspeed",
        ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "PORT"],
        "with_deepspeed.py",
        [],
    ),
}
LIMIT_S = 400.0


def missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


@pytest.fixture
def command(request: pytest.FixtureRequest) -> list[str]:
    module, before, script, arguments = WAYS[request.param]
    if missing(module):
        pytest.skip(f"{module} is not installed here; .venv-realcode (`make realcode`) has it")
    return [sys.executable, *before, str(HERE / script), *arguments]


def of_one_job(command: list[str], fate: str) -> list[str]:
    return [*(str(free_port()) if word == "PORT" else word for word in command), fate]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    # deepspeed's launcher takes `python` from PATH
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "DS_ACCELERATOR": "cpu", "RAY_AUTH_MODE": "disabled", **more}


def runs(tmp_path: Path) -> list[Path]:
    return sorted({p.parent for p in tmp_path.rglob("run.db")})


def ranks_of(run: Path) -> list[int]:
    return sorted(r for (r,) in rows(run, "SELECT rank FROM rank WHERE life != 'missing'"))


def results(job: Job) -> list[str]:
    return re.findall(r"loss -?\d+\.\d+", job.stdout())


@pytest.mark.parametrize("command", WAYS, indirect=True)
def test_a_hang_is_named_in_one_run(command: list[str], tmp_path: Path) -> None:
    script = next(Path(c) for c in command if c.endswith(".py"))
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "# HERE" in text)

    def errors() -> list[dict]:
        found = [rows(run, "SELECT json FROM finding WHERE severity = 'error'") for run in runs(tmp_path)]
        return [json.loads(text) for of_run in found for (text,) in of_run]

    env = environment(tmp_path, DISTDIAG="1", DISTDIAG_RUN_DIR=str(tmp_path / "run"))
    with start(of_one_job(command, "hangs"), cwd=tmp_path, env=env, timeout=2 * LIMIT_S) as job:
        (finding,) = wait_for(errors, LIMIT_S, "the verdict", job)
        (run,) = runs(tmp_path)
        assert ranks_of(run) == [0, 1]
    assert (finding["kind"] in ("deadlock", "mismatch"), finding["culprits"]) == (True, [1]), finding
    places = {(w["rank"], Path(w["file"]).name, w["line"]) for w in (*finding["where"], *finding["waiting"])}
    assert (1, script.name, line) in places


@pytest.mark.parametrize("command", WAYS, indirect=True)
def test_two_healthy_jobs_end_as_without_and_share_no_run(command: list[str], tmp_path: Path) -> None:
    with start(
        of_one_job(command, "ends"), cwd=tmp_path, env=environment(tmp_path, DISTDIAG="0"), timeout=LIMIT_S
    ) as job:
        assert job.wait() == 0, job.tail()
        wanted = results(job)
    assert wanted and not runs(tmp_path)
    with ExitStack() as stack:
        env = environment(tmp_path, DISTDIAG="1")
        together = (
            1 if "with_ray.py" in command[-1] else 2
        )  # a second ray.init on this host joins the first one's cluster
        jobs = [
            stack.enter_context(start(of_one_job(command, "ends"), cwd=tmp_path, env=env, timeout=LIMIT_S))
            for _ in range(together)
        ]
        for job in jobs:
            assert job.wait() == 0, job.tail()
            assert results(job) == wanted
        for run in runs(tmp_path):
            closed(run)
    assert [ranks_of(run) for run in runs(tmp_path)] == [[0, 1]] * together
    for run in runs(tmp_path):
        assert rows(run, "SELECT json FROM finding WHERE severity != 'info' AND cleared_s IS NULL") == []
