"""The signal that killed a rank is known even if the launcher reaped it before the monitor could ask the kernel."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distdiag.monitor.evidence.ask import fatal_signal, main_stack, parse_stacks

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


def test_a_file_has_one_name_however_its_script_was_started(tmp_path: Path) -> None:
    """Python keeps the `./` of `python ./job.py`, the page of a rank does not: two names would be two lines that no rank shares."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "job.py").write_text("import faulthandler\nfaulthandler.dump_traceback()\n")
    for started in ("job.py", "./job.py", "../job.py"):
        folder = tmp_path / "folder" if ".." in started else tmp_path
        command = [sys.executable, started]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
        assert main_stack(parse_stacks(ended.stderr)) == [(str(tmp_path / "job.py"), 2, "<module>")]
