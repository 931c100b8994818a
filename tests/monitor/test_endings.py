"""The exit status of a rank is read before its parent reaps it, also on kernels without pidfd."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from distdiag.monitor.host.processes import Endings, reaped_status


@pytest.mark.parametrize("pidfd", [True, False])
def test_an_exit_code_and_a_signal_are_read_before_the_parent_reaps(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    endings = Endings()
    exits = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(7)"])
    sleeps = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    for p in (exits, sleeps):
        endings.watch(p.pid)
    sleeps.kill()
    deadline = time.monotonic() + 30
    while len(endings.ended) < 2 and time.monotonic() < deadline:
        endings.wake.wait(0.2)
    found = {p.pid: (endings.ended[p.pid].exit_code, endings.ended[p.pid].signal) for p in (exits, sleeps)}
    for p in (exits, sleeps):
        p.wait()
    assert found[exits.pid][0] == 7 and found[sleeps.pid][1] == 9


@pytest.mark.parametrize(("command", "status"), [("kill -TERM $$", (None, 15)), ("exit 3", (3, None))])
def test_the_exit_status_of_a_reaped_process_is_read_from_its_pidfd(
    command: str, status: tuple[int | None, int | None]
) -> None:
    process = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    fd = os.pidfd_open(process.pid)
    try:
        assert reaped_status(fd) is None  # it lives
        process.communicate(b"\n")
        if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15):
            assert reaped_status(fd) is None
        else:
            assert reaped_status(fd) == status
    finally:
        os.close(fd)
