"""`%load_ext distdiag`, then `%%distdiag -n 2`: run a cell as ranks, and end a hang with its verdict.

The cell becomes a script that torchrun starts, so neither sees the other's variables. Its processes end with the cell: also by an
interrupt, and if the hang is proved (DISTDIAG_END_HANGS_S).
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distdiag import files
from distdiag.command_line import SETTINGS, read
from distdiag.errors import DistdiagError, need_torch
from distdiag.streams import say

if TYPE_CHECKING:
    from distdiag.report.run import Run

END_HANGS_S = "2"  # from the proof of a hang to the end of its ranks
GRACE_S = 5.0  # between SIGTERM and SIGKILL
WRITTEN_WITHIN_S = 15.0  # of the end of the ranks: the monitor's last rows
_MONITOR = "distdiag.monitor"
# torchrun, without the traceback that it adds when a rank has failed
_LAUNCHER = """
import sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main(sys.argv[1:])
except ChildFailedError:
    sys.exit(1)
"""


@click.command(context_settings=SETTINGS)
@click.option("-n", "ranks", type=click.IntRange(1, 1024), default=2, show_default=True, help="Number of ranks.")
def options(**_values: Any) -> None:
    """Run this cell as ranks under torchrun, recorded; show the verdict."""


def load(ipython: Any) -> None:
    """Register the magic command; called by `%load_ext distdiag`."""
    ipython.register_magic_function(cell_magic, "cell", "distdiag")


def cell_magic(line: str, cell: str) -> Run | None:
    """Run a cell as ranks and return the run, which the notebook shows as its verdict.

    Raises:
        IPython.core.error.UsageError: wrong options, no torch, or no rank was recorded; IPython prints it as one line.
    """
    from IPython.core.error import UsageError

    try:
        chosen = read(options, shlex.split(line), "%%distdiag")
        need_torch("%%distdiag")
        return _run(chosen["ranks"], line, cell)
    except SystemExit:  # --help
        return None
    except (DistdiagError, ValueError) as e:
        raise UsageError(f"{e.message}; {e.hint}" if isinstance(e, DistdiagError) else str(e)) from None


def _run(ranks: int, line: str, cell: str) -> Run:
    from distdiag.report.run import Run
    from distdiag.store import reader, rundir

    run = rundir.default_run_dir("cell").absolute()
    share = os.environ.get("DISTDIAG_SHARE") == "1"
    files.make_run_directory(run, share, exist_ok=False)
    # lines have the numbers that they have in the cell
    script = files.write(run, "cell.py", f"#%%distdiag {line}\n{cell}".encode("utf-8", "backslashreplace"))
    command = [sys.executable, "-c", _LAUNCHER, "--standalone", "--nproc-per-node", str(ranks), str(script)]
    path = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"DISTDIAG_END_HANGS_S": END_HANGS_S, "OMP_NUM_THREADS": "1"} | os.environ
    env |= {
        "DISTDIAG": "1", "DISTDIAG_RUN_DIR": str(run), "DISTDIAG_QUIET": "1", "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }  # fmt: skip
    job = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        _print_output(job)
    finally:
        _end(job)
    if job.returncode:
        say(f"exit code {job.returncode}")
    _wait_until_written(run)
    rundir.mark_latest(run)
    return reader.open_run(run, Run)


def _print_output(job: subprocess.Popen[bytes]) -> None:
    """Print what the job prints, until its launcher ends; a process that keeps the pipe open is not waited for."""
    assert job.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pipe = job.stdout.fileno()
    while True:
        ended = job.poll() is not None
        if select.select([pipe], [], [], 0.0 if ended else 0.2)[0]:
            data = os.read(pipe, 65_536)
            print(decoder.decode(data), end="", flush=True)
            if data:
                continue
            job.wait()
        if ended or job.poll() is not None:
            return


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the launcher and all its ranks, which are in other sessions; the monitor ends by itself."""
    import psutil

    with _without_interrupts():
        ours: set[Any] = set()
        with contextlib.suppress(psutil.Error):
            ours = _ranks(psutil.Process(job.pid)) if job.poll() is None else set()
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(GRACE_S)
        with contextlib.suppress(psutil.Error):
            ours |= _ranks(psutil.Process(job.pid)) if job.poll() is None else set()
        for process in ours:  # psutil checks that the number is still this process's
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        if job.stdout is not None:
            job.stdout.close()


def _ranks(launcher: Any) -> set[Any]:
    import psutil

    found = set()
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if _MONITOR not in process.cmdline():
                found.add(process)
    return found


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore further interrupts: the processes must end. Only the main thread may set signal handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_until_written(run: Path) -> None:
    """Wait until the monitor has closed the run.

    Raises:
        DistdiagError: nothing was recorded.
    """
    from distdiag.store import rundir
    from distdiag.store.opening import RunUnreadable
    from distdiag.store.reader import open_run

    deadline = time.monotonic() + WRITTEN_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RunUnreadable), open_run(run) as opened:
            if opened.meta.get("ended_s") is not None:
                return
        if not rundir.has_run(run):
            break
        time.sleep(0.1)
    if not (run / rundir.DATABASE).exists():
        raise DistdiagError(
            "no rank was recorded: the cell joined no process group", "call torch.distributed.init_process_group in it"
        )
