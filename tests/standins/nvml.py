"""Builds the stand-in for NVIDIA's driver library and runs Python code against it; see nvml.c."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")

# Answers of one healthy card, by question; NVML's units (milliwatts, bytes).
HEALTHY = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": "GPU-aaaa",
    "nvmlDeviceGetTemperature": "41",
    "nvmlDeviceGetUtilizationRates": "97 40",
    "nvmlDeviceGetMemoryInfo": "85899345920 1073741824",
    "nvmlDeviceGetPowerUsage": "350000",
    "nvmlDeviceGetEnforcedPowerLimit": "700000",
    "nvmlDeviceGetClockInfo": "1980",
    "nvmlDeviceGetMaxClockInfo": "1980",
    "nvmlDeviceGetCurrentClocksEventReasons": "0",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "0",
    "nvmlDeviceGetTotalEccErrors": "0",
    "nvmlDeviceGetNvLinkState": "18 18",
    "nvmlDeviceRegisterEvents": "1",
    "field59": "0",
}


@functools.cache
def library(old_driver: bool = False) -> Path:
    """Return a folder with the compiled libnvidia-ml.so.1; skips the test if there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for libnvidia-ml.so.1")
    folder = Path(tempfile.mkdtemp(prefix="nvml-stand-in-"))
    flags = ["-DOLD_DRIVER"] if old_driver else []
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    return folder


def answers(*cards: dict[str, str], extra: str = "") -> str:
    """Return the text of an answers file: one dictionary per card, applied to `HEALTHY`; an empty value removes a line."""
    lines = [f"count {len(cards)}"]
    for i, card in enumerate(cards):
        lines += [f"{i}.{k} {v}" for k, v in ({**HEALTHY, "nvmlDeviceGetUUID": f"GPU-{i}"} | card).items() if v]
    return "\n".join([*lines, extra]) + "\n"


def run(code: str, file: Path, *, old_driver: bool = False, deadline_s: float = 60.0) -> str:
    """Run Python code with the stand-in as its driver; return its stdout. Its stderr must be empty."""
    env = os.environ | {"LD_LIBRARY_PATH": str(library(old_driver)), "FAKE_NVML": str(file)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=deadline_s
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout
