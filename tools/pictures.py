"""`make pictures`: draw the README's pictures from real jobs on this machine, by the app itself.

Usage: python tools/pictures.py DIRECTORY [JOB…]
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
DEADLINE_S = 1200  # 64 ranks on two cores take six minutes
HEALTHY_STEPS = 200  # before the picture of a healthy job
SIZE = (130, 34)
FRAME_S, FILMED = 1.5, 7  # seconds between two pictures of the recording; number of them before the finding
MOMENTS = 20  # steps back in time, at most
LAST = (("9",), ("5",))  # keys to the screens that end the recording: timeline, findings
# job: (command, ranks, kinds of finding to wait for or none, {picture: keys that open the screen})
JOBS = {
    "straggler": (
        ["-m", "distdiag.run", "train_dialogs.py"], 3, ("straggler",), {"ranks": (), "heat": ("3",)},
    ),
    "healthy": (
        ["-m", "distdiag.train", "--", "--monitor", "--max-steps", "3000"], 2, (), {"healthy": ()},
    ),
    "many": (
        ["-m", "distdiag.run", "many_ranks.py"], 64, ("straggler",), {"ranks64": ()},
    ),
    "deadlock": (
        ["-m", "distdiag.run", "train_unet.py"], 3, ("deadlock", "mismatch"),
        {"deadlock": ("9",), "findings": ("5",), "replay": ("left_curly_bracket",)},
    ),
}  # fmt: skip
# 64 ranks that sleep nearly all the time, so that two cores are enough; the files of ranks 37 and 38 are on a slow disk
MANY = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

class Scans(Dataset):
    def __init__(self, slow):
        self.seconds = 0.6 if slow else 0.05
    def __len__(self):
        return 4000
    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.randn(32)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
    def forward(self, x):
        time.sleep(0.3)
        return self.layer(x)

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for x in DataLoader(Scans(dist.get_rank() in (37, 38)), 1):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCRIPTS = {
    "train_dialogs.py": ROOT / "tests/faults/jobs/long_dialogs.py",  # rank 2 has five times as many turns per dialogue
    "train_unet.py": ROOT / "tests/faults/jobs/unet_cells.py",  # rank 0 alone evaluates through the wrapper
}


@contextlib.contextmanager
def running(job: list[str], ranks: int, run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job in the current directory; end it and its ranks on exit."""
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
    """Wait until the run has an open finding of one of these kinds, or for a healthy job, for some steps."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        if _found(run, kinds) if kinds else _steps(run) >= HEALTHY_STEPS:
            time.sleep(2)  # until its frames are written
            return
        time.sleep(0.5)
    raise SystemExit(f"pictures: error: no {' or '.join(kinds)} within {DEADLINE_S} s\n{Path('job.log').read_text()}")


async def draw(directory: Path, run: Path, pictures: dict[str, tuple[str, ...]]) -> None:
    """Write the screens that the keys open."""
    for name, keys in pictures.items():
        async with showing(run, SIZE, Ui()) as screen:
            await screen.press(*keys)
            if name == "replay":
                await screen.until(lambda screen=screen: screen.app.ui.paused_at_s is not None)
                for _ in range(MOMENTS):  # back to a moment before the finding
                    if not screen.app.snap.open_findings:
                        break
                    await screen.press(*keys)
            print(await screen.settled())
            (directory / f"{name}.svg").write_text(screen.app.canvas.picture("distdiag tui"))


async def record(directory: Path, run: Path, kinds: tuple[str, ...], process: subprocess.Popen[bytes]) -> None:
    """Write the recording of a running job: its ranks until the finding, then the screens that explain it."""
    deadline = time.monotonic() + DEADLINE_S
    while not _steps(run):
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(f"pictures: error: the job did not start\n{Path('job.log').read_text()}")
        await asyncio.sleep(0.2)
    pictures: list[tuple[str, int]] = []
    async with showing(run, SIZE, Ui()) as screen:
        while not _found(run, kinds) and time.monotonic() < deadline:
            pictures = [*pictures, (screen.app.canvas.picture("distdiag tui"), 1)][-FILMED:]
            await asyncio.sleep(FRAME_S)
        for keys in ((), *LAST):
            await asyncio.sleep(FRAME_S)
            await screen.press(*keys)
            pictures.append((screen.app.canvas.picture("distdiag tui"), 3))
    (directory / "recording.svg").write_text(film(pictures, FRAME_S))


def film(pictures: list[tuple[str, int]], beat_s: float) -> str:
    """Return one SVG that shows each picture for some beats, again and again; without animation, the last one."""
    total = sum(beats for _, beats in pictures)
    rules = [
        f"@keyframes p{n} {{ 0% {{ visibility: visible }} {100 * n / total:.3f}%, 100% {{ visibility: hidden }} }}"
        for n in sorted({beats for _, beats in pictures})
    ]
    rules.append("@media (prefers-reduced-motion: reduce) { g { animation: none !important } }")
    out, begun = [pictures[0][0].partition("\n")[0], f"<style>{' '.join(rules)}</style>"], 0
    for i, (picture, beats) in enumerate(pictures):
        inner = picture.partition("\n")[2].rpartition("</svg>")[0]
        hidden = "" if i == len(pictures) - 1 else ' visibility="hidden"'
        turn = f"animation:p{beats} {total * beat_s:g}s step-end {(begun - total) * beat_s:g}s infinite"
        out.append(f'<g style="{turn}"{hidden}>\n{inner}</g>')
        begun += beats
    return "\n".join([*out, "</svg>"]) + "\n"


def _steps(run: Path) -> int:
    """Return the newest step of a run; 0 if it has none, or cannot be read yet."""
    with contextlib.suppress(DistdiagError), open_run(run) as opened:
        return opened.query("SELECT max(step) FROM step")[0][0] or 0
    return 0


def _found(run: Path, kinds: tuple[str, ...]) -> bool:
    with contextlib.suppress(DistdiagError), open_run(run) as opened:
        return any(f.kind in kinds and f.cleared_s is None for f in opened.report().findings)
    return False


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or not set(sys.argv[2:]) <= set(JOBS):
        raise SystemExit(f"usage: python tools/pictures.py DIRECTORY [JOB…]; jobs: {', '.join(JOBS)}")
    directory = Path(sys.argv[1]).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or JOBS:
        job, ranks, kinds, pictures = JOBS[name]
        with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):  # the path is in the picture
            for script, source in SCRIPTS.items():
                Path(script).write_text(source.read_text())
            Path("many_ranks.py").write_text(MANY)
            run = Path("reports/train")
            with running(job, ranks, run) as process:
                if name == "deadlock":
                    asyncio.run(record(directory, run, kinds, process))
                wait_for_finding(run, kinds, process)
                asyncio.run(draw(directory, run, pictures))


if __name__ == "__main__":
    main()
