"""Signals to ranks: nobody gets one but the process that maps the page, and only a real-time signal that it handles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distdiag.monitor.evidence import signals
from distdiag.page.layout import page_path
from tests.monitor.test_damaged_pages import a_page

NUMBER = signal.SIGRTMIN + 13
# Maps the file that it is given, or nothing, and has a child that does not; prints what either gets.
PROCESS = """
    import mmap, os, select, signal, sys, time
    if sys.argv[1]:
        held = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
    for number in (signal.SIGTERM, signal.SIGRTMIN + 13):
        signal.signal(number, lambda n, _: os.write(1, f"{os.getpid()} {n}\\n".encode()))
    ready, child_is_ready = os.pipe()
    child = os.fork()
    if not child:
        if sys.argv[1]:
            held.close()
        os.write(child_is_ready, b".")
        while True:
            time.sleep(0.05)  # a signal that comes just before a wait without a limit would not be seen
    os.read(ready, 1)  # Python drops a signal that a child gets before it has returned from fork()
    print(child, flush=True)
    while not select.select([0], [], [], 0.05)[0]:
        pass
    os.kill(child, signal.SIGKILL)
"""


@contextmanager
def process(page: Path | None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(page or "")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        yield started, int(started.stdout.readline())
        started.communicate("")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    a_page(tmp_path, 0)
    return page_path(tmp_path, 0)


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


@pytest.mark.parametrize("pidfd", ["yes", "an old kernel", "a Python built on an old system"])
def test_the_rank_that_maps_its_page_and_its_child_get_the_signal(
    page: Path, pidfd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pidfd == "an old kernel":
        monkeypatch.setattr(os, "pidfd_open", _old_kernel)
    elif pidfd != "yes":
        monkeypatch.delattr(os, "pidfd_open")
    with process(page) as (rank, child):
        signals.send(rank.pid, NUMBER, page)
        assert line(rank) == f"{rank.pid} {NUMBER}"
        signals.send(rank.pid, NUMBER, page, worker=child)
        assert line(rank) == f"{child} {NUMBER}"


def _old_kernel(pid: int) -> int:
    raise OSError(38, "Function not implemented")


def test_nobody_else_gets_one(page: Path) -> None:
    with process(page) as (rank, child), process(None) as (other, _):
        for number in (0, -1, signal.SIGTERM, signal.SIGKILL, signal.SIGRTMIN - 1, signal.SIGRTMAX + 1):
            with pytest.raises(OSError, match="real-time"):
                signals.send(rank.pid, number, page)
        with pytest.raises(OSError, match="map"):
            signals.send(other.pid, NUMBER, page)
        with pytest.raises(OSError, match="map"):
            signals.send(child, NUMBER, page)
        with pytest.raises(OSError, match="child"):
            signals.send(rank.pid, NUMBER, page, worker=other.pid)
        with pytest.raises(OSError, match="handler"):
            signals.send(rank.pid, NUMBER - 2, page)
        page.chmod(0o666)  # anyone could have put the number there
        with pytest.raises(OSError, match="map"):
            signals.send(rank.pid, NUMBER, page)
        for each in (rank, other):
            assert each.poll() is None
            assert each.communicate("")[0] == ""
