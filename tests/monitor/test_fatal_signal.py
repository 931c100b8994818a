"""The signal that killed a rank is known even if the launcher reaped it before the monitor could ask the kernel."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.monitor.evidence.ask import fatal_signal

SCRIPT = (
    "import faulthandler, os, sys; faulthandler.enable(open(sys.argv[1], 'w')); os.kill(os.getpid(), int(sys.argv[2]))"
)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGKILL"])
def test_faulthandlers_text_names_the_signal(name: str, tmp_path: Path) -> None:
    number = signal.Signals[name]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "fatal", str(int(number))], timeout=60, check=False
    )
    assert ended.returncode == -number
    text = (tmp_path / "fatal").read_text()
    assert fatal_signal(text) == (None if name == "SIGKILL" else number)  # no handler runs at a SIGKILL
