"""`make pictures`: the README's pictures, drawn by the app itself on made-up runs.

Usage: python tools/pictures.py DIRECTORY
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distdiag.tui.ui import Ui
from tests.tui.drive import showing
from tests.tui.synthetic import Scenario, make

PICTURES = {
    # name: (what the job is doing, screen, size)
    "ranks": (Scenario(state="running", ranks=8), Ui(), (120, 32)),
    "deadlock": (Scenario(state="deadlocked", ranks=8), Ui(), (120, 32)),
    "heat": (Scenario(state="running", ranks=64), Ui(page="heat"), (120, 32)),
}


async def draw(directory: Path) -> None:
    for name, (scenario, ui, size) in PICTURES.items():
        with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):  # the path is in the picture
            async with showing(make(Path("reports/llama-1b"), scenario, monitor="always"), size, ui) as screen:
                path = directory / f"{name}.svg"
                path.write_text(screen.app.export_screenshot(title="distdiag tui"))
                print(path.name)


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw(target))
