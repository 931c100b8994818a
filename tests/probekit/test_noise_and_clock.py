"""Foreign CPU from the kernel's counters, and one clock for several hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from distdiag.probekit.measure.noise import BlockNoise, foreign_cpus, read_cpu
from distdiag.probekit.ranks.clock import offset_from_exchanges

STAT = """cpu  100 1 50 1000 5 2 3 7 0 0
cpu0 60 1 30 500 5 2 3 4 0 0
cpu1 40 0 20 500 0 0 0 3 0 0
intr 12345
"""


@pytest.mark.parametrize(("ours", "ticks"), [({0, 1}, 60 + 1 + 30 + 4 + 40 + 20 + 3), ({1}, 63), ({1, 7}, 63)])
def test_busy_time_is_user_nice_system_and_steal_of_our_cpus(
    ours: set[int], ticks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: ours)
    assert read_cpu().busy_s == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize(
    ("busy", "own", "wall", "foreign"), [(2.0, 0.5, 1.0, 1.5), (1.0, 1.2, 1.0, 0.0), (None, 1.0, 1.0, None)]
)
def test_foreign_load_is_busy_time_minus_ours(busy: float | None, own: float, wall: float, foreign: float | None):
    assert foreign_cpus(busy, own, wall) == foreign


@pytest.mark.parametrize(
    ("foreign", "cpus", "ranks", "noisy"),
    [
        (1.5, 2, 2, True),  # two ranks are left with half a CPU
        (0.1, 2, 2, False),  # less than a tenth
        (8.0, 16, 2, False),  # eight CPUs are left for two ranks
        (8.0, 16, 12, True),
        (None, 2, 2, False),  # not measured: no judgement
        (0.0, 2, 8, False),  # our own ranks compete; there is no foreign load
    ],
)
def test_a_host_is_noisy_if_others_leave_too_little_cpu(foreign: float | None, cpus: int, ranks: int, noisy: bool):
    assert BlockNoise(foreign, cpus, ranks).noisy is noisy


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat")
def test_a_busy_neighbour_is_foreign_load_and_a_child_is_not():
    burn = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(burn) as child:
        try:
            before_alone, before_family = read_cpu(), read_cpu(children=True)
            after_alone = before_alone
            deadline = time.monotonic() + 60
            after_family = before_family
            while after_family.own_s - before_family.own_s < 0.2 and time.monotonic() < deadline:
                time.sleep(0.05)
                after_alone, after_family = read_cpu(), read_cpu(children=True)
        finally:
            child.kill()
    assert before_alone.busy_s is not None and after_alone.busy_s is not None
    busy = after_alone.busy_s - before_alone.busy_s
    assert after_family.own_s - before_family.own_s >= 0.2  # this reading counts the child as ours
    assert busy - (after_alone.own_s - before_alone.own_s) > 0.1  # that one counts it as foreign


def test_the_offset_is_taken_from_the_shortest_round_trip():
    # Their clock is 1,000,000 ns ahead. The slow exchange is delayed in one direction only, and would give another offset.
    exchanges = [
        (0, 1_000_000 + 50_000, 60_000),
        (100_000, 1_000_000 + 105_000, 110_000),
        (200_000, 1_290_000, 300_000),
    ]
    offset, error = offset_from_exchanges(exchanges)
    assert offset == pytest.approx(1_000_000, abs=1)
    assert error == 5_000
