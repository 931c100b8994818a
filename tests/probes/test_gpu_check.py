"""`make gpu-check` without a GPU: it ends, every check reports why, and nothing is written."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", BENCHMARKS / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run `make gpu-check` itself")
def test_without_a_gpu_every_check_is_skipped_with_a_reason(gpu_check: ModuleType, tmp_path: Path):
    output = tmp_path / "result.json"
    p = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), "-o", str(output)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert p.returncode == 4, p.stderr
    lines = [line for line in p.stdout.splitlines() if line.startswith("not possible here")]
    assert [line.split()[3] for line in lines] == [c.name for c in gpu_check.CHECKS]
    assert f"{len(lines)} not possible here" in p.stdout.splitlines()[-1]
    assert output.exists() and '"device": null' in output.read_text()


def test_the_limits_fit_into_ten_minutes_and_the_scripts_compile(gpu_check: ModuleType):
    assert gpu_check.TOTAL_S < 600
    assert all(0 < c.limit_s <= gpu_check.TOTAL_S for c in gpu_check.CHECKS)
    for script in ("JOB", "COMPILE", "CAPTURE", "FAULTY"):
        compile(getattr(sys.modules["_gpu_recorder"], script), f"{script}.py", "exec")


def test_a_check_that_hangs_or_crashes_is_a_failure(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch):
    check = gpu_check.CHECKS[0]
    monkeypatch.setattr(gpu_check, "finished", lambda *_: (124, "", "no end within 60 s"))
    assert gpu_check.run_check(check, 100.0).word == "fail"
    monkeypatch.setattr(gpu_check, "finished", lambda *_: (-6, "half a line", "abort"))
    outcome = gpu_check.run_check(check, 100.0)
    assert outcome.word == "fail" and "-6" in outcome.text
    assert gpu_check.run_check(check, 5.0).word == "not possible here"


def test_a_command_at_its_limit_is_killed_with_its_children(gpu_check: ModuleType):
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    code, _, error = sys.modules["_gpu_base"].finished([sys.executable, "-c", script], 1.0)
    assert code == 124 and "no end within 1 s" in error
