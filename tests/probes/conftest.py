"""Ranks for the tests: forked from the test's own process, which has imported torch already."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from distdiag.probekit.command.options import parse, place_ranks
from distdiag.probekit.measure.probe import load_probe
from distdiag.probekit.ranks.launch import launch
from distdiag.probekit.verdict.result import Result

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Result]]:
    """Run a probe on forked ranks: `on_ranks("allreduce", "--max-bytes", "4K", seconds=2)`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(name: str, *arguments: str, seconds: float = 2.0, nproc: int = 2) -> list[Result]:
        options = parse([*arguments, "--nproc", str(nproc), "--no-record"], name)
        probe = None if name == "all" else load_probe(name)
        ranks = place_ranks(options, 0, probe.min_ranks if probe else 1, 2)
        if probe is not None:
            probe.check(options)
            probe.preload()  # before the clock runs: imports take seconds on a busy machine
        return launch(options, ranks, time.monotonic() + seconds)

    return run


@pytest.fixture
def clean_environment() -> dict[str, str]:
    """Return the environment of a command without a launcher, outside any run directory."""
    launchers = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "SLURM_",
        "OMPI_",
        "PMI_",
        "TORCHELASTIC_",
        "DISTDIAG_",
        "FORCE_COLOR",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def no_child_left():
    """Assert that the test leaves no new child process."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 20
    while left := [
        p
        for p in psutil.Process().children(recursive=True)
        if p.pid not in before and p.status() != psutil.STATUS_ZOMBIE
    ]:
        if time.monotonic() > deadline:
            for p in left:
                p.kill()
            pytest.fail(f"left behind: {left}")
        time.sleep(0.05)
