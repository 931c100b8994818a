"""DISTDIAG_END_HANGS_S ends nobody unless it is a time."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from distdiag import procfs
from distdiag.monitor.evidence import signals
from distdiag.monitor.hang_limit import VARIABLE, HangLimit
from tests.jobs import closed, distdiag, launch

RANK = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as f:
    page = mmap.mmap(f.fileno(), 4096)
print("mapped", flush=True)
time.sleep(60)
"""
HANG = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank():
        dist.recv(torch.zeros(2), src=0)
    else:
        dist.barrier()
"""


@pytest.mark.parametrize(
    ("value", "limit_s"),
    [("3", 3.0), ("0.5", 0.5), ("nan", None), ("-1", None), ("inf", None), ("soon", None), ("", None)],
)
def test_only_a_time_is_a_limit(monkeypatch: pytest.MonkeyPatch, value: str, limit_s: float | None) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert HangLimit().limit_s == limit_s


def test_no_rank_runs_on_when_the_first_is_ended(tmp_path: Path) -> None:
    """A rank that outlives its peer prints an error, which would hide the hang."""
    ranks, pages = [], {}
    try:
        for i in range(12):
            page = tmp_path / f"rank_{i}.page"
            page.write_bytes(bytes(4096))
            page.chmod(0o600)
            ranks.append(subprocess.Popen([sys.executable, "-Sc", RANK, page], stdout=subprocess.PIPE))
            pages[i] = ranks[i].pid, page
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == b"mapped\n"
        stranger = tmp_path / "rank_12.page"
        stranger.write_bytes(bytes(4096))
        watcher = subprocess.Popen(["sleep", "60"])
        ranks.append(watcher)
        signals_sent = _Recorder(signals.signal.pidfd_send_signal)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(signals.signal, "pidfd_send_signal", signals_sent)
            assert signals.end({**pages, 12: (watcher.pid, stranger), 13: (1 << 30, stranger)}) == list(range(12))
        assert signals_sent.numbers == [signal.SIGSTOP] * 12 + [signal.SIGKILL] * 12
        assert [rank.wait(10) for rank in ranks[:12]] == [-signal.SIGKILL] * 12
        assert watcher.poll() is None and procfs.stat_fields(watcher.pid)[procfs.STATE] in "SR"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()


class _Recorder:
    """Sends signals, and keeps their numbers in order."""

    def __init__(self, send: Callable[[int, int], None]) -> None:
        self._send, self.numbers = send, cast("list[int]", [])

    def __call__(self, fd: int, number: int) -> None:
        self.numbers.append(number)
        self._send(fd, number)


@pytest.mark.job
@pytest.mark.timeout(120)
def test_the_verdict_tells_who_has_ended_the_job(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(textwrap.dedent(HANG))
    command = ["-m", "distdiag.run", "--run-dir", "R", "hang.py"]
    with launch(command, cwd=tmp_path, env={VARIABLE: "0.5"}, fork_ranks=True) as job:
        assert job.wait() != 0, job.tail()
        closed(tmp_path / "R")
    text = " ".join(distdiag("diagnose", "R", cwd=tmp_path).stdout.split())
    assert "failed: stopped by SIGKILL (from distdiag, as DISTDIAG_END_HANGS_S asks); 1 error" in text
