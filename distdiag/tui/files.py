"""What the app writes on request: a snapshot, a picture, and the stacks of `distdiag dump`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import App

from distdiag.store.liveness import Monitor
from distdiag.tui import once
from distdiag.tui.draw.text import quote

if TYPE_CHECKING:
    from distdiag.tui.data.snapshot import Snapshot
    from distdiag.tui.data.source import Source
    from distdiag.tui.draw.canvas import Canvas
    from distdiag.tui.ui import Ui


class Files(App[None]):
    """The part of the app that writes files and starts processes; everything else of it only reads."""

    if TYPE_CHECKING:
        snap: Snapshot
        ui: Ui
        source: Source
        canvas: Canvas

        def say(self, text: str) -> None: ...
        def redraw(self, late: bool = False) -> None: ...

    def _free_name(self, suffix: str) -> Path:
        stem = f"distdiag-{self.snap.run.resolve().name}-{time.strftime('%H%M%S')}"
        path, n = Path(f"{stem}.{suffix}"), 2
        while path.exists():
            path, n = Path(f"{stem}-{n}.{suffix}"), n + 1
        return path

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.write_bytes(data)
            self.say(f"written: {path}")
        except OSError as e:
            self.say(f"cannot write {path}: {e.strerror}")

    def action_export(self) -> None:
        self._write(self._free_name("json"), once.as_json(self.snap) + b"\n")

    def action_picture(self) -> None:
        title = f"distdiag tui {quote(self.snap.run)}"
        self._write(self._free_name("svg"), self.canvas.picture(title).encode())

    async def action_refresh_stacks(self) -> None:
        """Run `distdiag dump`: the only action here that asks the ranks, and only on request."""
        if self.ui.busy or self.snap.monitor is not Monitor.LIVE:
            return self.say("stacks can be taken while the job runs")
        self.ui.busy = "taking the stacks of all ranks …"
        self.redraw()
        self.run_worker(self._dump(), exclusive=True)

    async def _dump(self) -> None:
        text = ""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "distdiag", "dump", str(self.snap.run),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, errors = await process.communicate()
            if process.returncode:
                lines = errors.decode(errors="replace").strip().splitlines()
                text = lines[0] if lines else f"distdiag dump ended with code {process.returncode}"
        except OSError as e:
            text = f"cannot start distdiag dump: {e.strerror}"
        self.ui.busy = ""
        self.ui.message = text
        self.source.again()
        self.redraw()
