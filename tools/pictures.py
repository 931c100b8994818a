"""`make pictures`: the README's pictures, recorded from real jobs on this machine by the app itself.

Usage: python tools/pictures.py DIRECTORY [NAME…]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distdiag import open_run
from distdiag.errors import DistdiagError
from distdiag.tui.ui import Ui
from tests.tui.drive import showing

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 240
SIZE = (120, 30)
# name: (job, ranks, the kinds of finding that the picture may show)
PICTURES = {
    "ranks": (["-m", "distdiag.run", "train_dialogs.py"], 3, ("straggler",)),
    "deadlock": (["-m", "distdiag.run", "train_unet.py"], 3, ("deadlock", "mismatch")),
}
SCRIPTS = {
    "train_dialogs.py": ROOT / "tests/faults/jobs/long_dialogs.py",  # rank 2 has five times as many turns per dialogue
    "train_unet.py": ROOT / "tests/faults/jobs/unet_cells.py",  # rank 0 alone evaluates through the wrapper
}


@contextlib.contextmanager
def running(job: list[str], ranks: int, run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job in the current directory; end it and its ranks on the way out."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DISTDIAG_RUN_DIR": str(run)}
    with Path("job.log").open("wb") as log:
        process = subprocess.Popen([*launcher, *job], env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)  # torchrun ends its ranks
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for_finding(run: Path, kinds: tuple[str, ...], process: subprocess.Popen[bytes]) -> None:
    """Wait until the run has an open finding of one of these kinds."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(DistdiagError), open_run(run) as opened:
            if any(f.kind in kinds and f.cleared_s is None for f in opened.report().findings):
                time.sleep(2)  # the frames of the same moment
                return
        time.sleep(0.5)
    raise SystemExit(f"pictures: error: no {' or '.join(kinds)} within {DEADLINE_S} s\n{Path('job.log').read_text()}")


async def draw(path: Path, run: Path) -> None:
    async with showing(run, SIZE, Ui()) as screen:
        await screen.settled()
        path.write_text(screen.app.export_screenshot(title="distdiag tui"))
        print(screen.text())


def main() -> None:
    directory = Path(sys.argv[1]).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or PICTURES:
        job, ranks, kinds = PICTURES[name]
        with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):  # the path is in the picture
            for script, source in SCRIPTS.items():
                Path(script).write_text(source.read_text())
            run = Path("reports/train")
            with running(job, ranks, run) as process:
                wait_for_finding(run, kinds, process)
                asyncio.run(draw(directory / f"{name}.svg", run))
                shown = subprocess.run(
                    [sys.executable, "-m", "distdiag", "diagnose", str(run)],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                print(shown.stdout, Path("job.log").read_text()[-3000:], sep="\n--\n")


if __name__ == "__main__":
    main()
