"""What the kernel reports about a rank's DataLoader workers: whether they wait for a CPU, or for something else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from distdiag import procfs
from distdiag.monitor.host.samples import Hosts
from distdiag.monitor.ranks.state import Gauges

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
SPINS = "while True: pass"
SLEEPS = "import time\nwhile True: time.sleep(0.05)"


@pytest.mark.parametrize(("worker", "busy"), [(SPINS, True), (SLEEPS, False)], ids=["computes", "sleeps"])
def test_workers_without_a_cpu_differ_from_sleeping_ones(worker: str, busy: bool) -> None:
    hosts, gauges, end = Hosts(0), Gauges(), time.monotonic() + 30
    with subprocess.Popen([sys.executable, "-c", PARENT, worker], start_new_session=True) as parent:
        try:
            wants: float | None = None
            while wants is None or not (
                wants > 0.5 if busy else wants < 0.3
            ):  # its start is work, too, until it leaves the window
                assert time.monotonic() < end, wants
                hosts.process_row(0.0, 0, parent.pid, gauges)
                wants = gauges.workers_busy
                time.sleep(0.2)
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(parent.pid)], check=False)


FORKS = """
import os, sys
data, (told, tell) = bytearray(b"x") * (64 << 20), os.pipe()
def fork():
    if not os.fork():
        while os.read(told, 1):
            data[::4096] = bytes(len(data) // 4096)
fork()
sys.stdin.readline()
os.write(tell, b"x")
sys.stdin.readline()
fork()
sys.stdin.readline()
"""


def test_pages_that_a_worker_copies_are_its_memory_until_there_are_other_workers() -> None:
    """A fork shares the parent's pages: by its resident size a worker has had them from the beginning."""
    hosts, gauges, until = Hosts(0), Gauges(), time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, start_new_session=True) as parent:

        def wait_for(done: Callable[[list[int]], bool]) -> None:
            while not done([size for _, size in gauges.worker_memory]):
                assert time.monotonic() < until
                hosts.process_row(time.monotonic(), 0, parent.pid, gauges)
                time.sleep(0.05)

        def tell() -> None:
            assert parent.stdin is not None
            parent.stdin.write(b"\n")
            parent.stdin.flush()

        try:
            wait_for(lambda sizes: len(sizes) > 2)
            tell()
            wait_for(lambda sizes: sizes[-1] > sizes[0] + (24 << 20))  # half of each page was its own before
            first_s = gauges.worker_memory[0][0]
            tell()
            wait_for(lambda sizes: bool(sizes) and gauges.worker_memory[0][0] > first_s)
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(parent.pid)], check=False)


def test_a_process_that_shares_its_core_waits_for_a_cpu() -> None:
    """Three processes that compute on one core: each waits for it two thirds of the time."""
    hosts, gauges, end = Hosts(0), Gauges(), time.monotonic() + 30
    pinned = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" + SPINS
    competing = [subprocess.Popen([sys.executable, "-c", pinned]) for _ in range(3)]
    try:
        queued: float | None = None
        while queued is None or queued < 0.4:
            assert time.monotonic() < end, queued
            hosts.process_row(0.0, 0, competing[0].pid, gauges)
            queued = gauges.queued_share
            time.sleep(0.2)
    finally:
        for p in competing:
            p.kill()
            p.wait()


def test_a_process_that_has_ended_gives_no_sample_with_zero_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has reaped it yet
        assert Hosts(0).process_row(0.0, 0, ended.pid, Gauges()) is None


@pytest.mark.parametrize(
    ("end", "shown"), [("os.kill(0x0, 9)", (None, 9)), ("os._exit(3)", (3, None)), ("os._exit(0)", None)]
)
def test_a_process_of_a_rank_that_failed_unnoticed_is_seen(
    end: str, shown: tuple[int | None, int | None] | None
) -> None:
    """A feeder that the kernel killed, for memory: its rank waits for its queue for ever."""
    end = end.replace("0x0", "os.getpid()")
    parent_of = f"import os, sys\nif not os.fork():\n    {end}\nsys.stdin.read()"
    until, hosts, gauges = time.monotonic() + 30, Hosts(0), Gauges()
    with subprocess.Popen([sys.executable, "-c", parent_of], stdin=subprocess.PIPE) as rank:
        while not (found := procfs.children(rank.pid)) or procfs.stat_fields(found[0])[procfs.STATE] != "Z":
            assert time.monotonic() < until
            time.sleep(0.01)
        hosts.process_row(0.0, 0, rank.pid, gauges)
        rank.communicate()
    assert gauges.dead_child == shown
