"""What the kernel says of a rank's DataLoader workers: whether they wait for a CPU, or for something else."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from distdiag.monitor.hosts import Hosts

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
SPINS = "while True: pass"
SLEEPS = "import time\nwhile True: time.sleep(0.05)"


@pytest.mark.parametrize(("worker", "busy"), [(SPINS, True), (SLEEPS, False)], ids=["computes", "sleeps"])
def test_workers_that_want_a_cpu_are_told_from_those_that_sleep(worker: str, busy: bool) -> None:
    hosts, end = Hosts(0), time.monotonic() + 30
    with subprocess.Popen([sys.executable, "-c", PARENT, worker], start_new_session=True) as parent:
        try:
            row = hosts.process_row(0.0, 0, parent.pid)
            while row is None or not row.children:
                assert time.monotonic() < end
                time.sleep(0.05)
                row = hosts.process_row(0.0, 0, parent.pid)
            time.sleep(1.0)  # it has started
            hosts.process_row(1.0, 0, parent.pid)
            hosts._loading[0].clear()
            for t in range(3):
                hosts.process_row(float(t), 0, parent.pid)
                time.sleep(0.4)
            _, wants = hosts.workers(0)
            assert wants is not None and (wants > 0.5) is busy and (wants < 0.3) is not busy
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(parent.pid)], check=False)
    assert hosts.workers(1) == (None, None)
