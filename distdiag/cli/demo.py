"""`distdiag demo`: a job that hangs, and its verdict."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from distdiag.cli.options import ascii_option
from distdiag.errors import DistdiagError, ExitCode, need_torch
from distdiag.streams import say

MOST_OUTPUT = 65_536  # bytes
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
VERDICT_WITHIN_S = 60.0  # of the start; on two busy cores torch alone takes ten to be imported


@click.command()
@click.option("--run-dir", metavar="DIR", help="Run directory (default: ./reports/<time>-demo).")
@ascii_option
def command(run_dir: str | None) -> int:
    """Start two ranks on this machine's CPU that hang after some steps; print the verdict and one screen, then end them.

    Needs torch, no GPU and no data. The job is a short script, distdiag/train/demo_job.py.
    """
    from distdiag.store import rundir

    need_torch("the demo")
    run = Path(run_dir) if run_dir else Path("reports") / time.strftime("%Y%m%d-%H%M%S-demo")
    if (run / rundir.DATABASE).exists():
        raise DistdiagError(f"{run} has a run already", "name another directory with --run-dir")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = ["-m", "distdiag.run", "--run-dir", str(run), "-m", "distdiag.train.demo_job"]
    say(
        f"Two ranks train on this machine until rank 0 evaluates alone:\n  torchrun {shlex.join([*launcher[2:], *job])}\n"
    )
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    # signals that came: an exception of a handler can be lost in an import, or leave `Popen` without its process
    stops: list[int] = []
    with tempfile.TemporaryFile() as output, _on_signals(lambda number, _: stops.append(number), *_ENDING):
        ranks = subprocess.Popen(
            [sys.executable, *launcher, *job],
            env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            found = _wait_for_error(ranks, run, stops)
            if not stops:
                output.seek(0)  # what came until now; not how the launcher words its end
                say(output.read(MOST_OUTPUT).decode(errors="replace").rstrip())
            if found:
                _show(run)
        finally:
            _end(ranks)
    if stops:
        raise KeyboardInterrupt if stops[0] == signal.SIGINT else SystemExit(128 + stops[0])
    if not found:
        say(f"distdiag: no verdict within {VERDICT_WITHIN_S:g} s; `distdiag doctor` checks this machine", err=True)
        return int(ExitCode.TIMEOUT)
    where = shlex.quote(str(run))
    say(f"\nThe job was ended. Its run can still be read:\n  distdiag diagnose {where}\n  distdiag tui {where}")
    say("For your own job, set one variable:\n  DISTDIAG=1 torchrun --nproc-per-node 8 train.py")
    return int(ExitCode.OK)


@contextlib.contextmanager
def _on_signals(handler: Any, *numbers: int) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _wait_for_error(ranks: subprocess.Popen[bytes], run: Path, stops: Sequence[int]) -> bool:
    """Return True once the run has an error, and False if the job ends or takes too long, or the demo is stopped."""
    from distdiag.diagnosis.model.findings import Severity
    from distdiag.store.opening import RunUnreadable
    from distdiag.store.reader import open_run

    deadline = time.monotonic() + VERDICT_WITHIN_S
    while time.monotonic() < deadline and ranks.poll() is None and not stops:
        time.sleep(0.25)
        try:
            with open_run(run) as opened:
                if any(f.severity == Severity.ERROR for f in opened.findings()):
                    time.sleep(1.0)  # until the monitor has printed it
                    return True
        except RunUnreadable:  # not created yet
            pass
    return False


def _show(run: Path) -> None:
    say("\nThe live view, `distdiag tui`, one screen of it:\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "distdiag", "tui", "--once", str(run)], check=False)


def _end(ranks: subprocess.Popen[bytes]) -> None:
    """End the launcher with its ranks; torchrun gives them a moment, and then kills them."""
    with _on_signals(signal.SIG_IGN, *_ENDING):  # nor a second Ctrl-C
        if ranks.poll() is None:
            ranks.send_signal(signal.SIGTERM)
            try:
                ranks.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(ranks.pid, signal.SIGKILL)
                ranks.wait()
