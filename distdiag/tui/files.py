"""What the app does on request besides reading: a snapshot, a picture, `distdiag dump`, `distdiag profile`."""

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


MANY_RANKS = 8  # of more than that, two are profiled: the slowest and one with the median time


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
        """Run `distdiag dump`, which asks the ranks for their stacks."""
        self._start("stacks can be taken while the job runs", "taking the stacks of all ranks …", "dump")

    async def action_record_profile(self) -> None:
        """Run `distdiag profile`: of the rank that is shown, of all ranks, or of the slowest and a peer if they are many."""
        chosen: tuple[str, ...] = ()
        if self.ui.page == "rank" and self.ui.rank is not None:
            chosen = ("--ranks", str(self.ui.rank))
        elif self.snap.summary.n > MANY_RANKS:
            chosen = ("--culprit",)
        self._start(
            "a profile can be recorded while the job runs", "recording a profile of three steps …", "profile", *chosen,
            then="profile",
        )  # fmt: skip

    def _start(self, refusal: str, busy: str, command: str, *options: str, then: str = "") -> None:
        if self.ui.busy or self.snap.monitor is not Monitor.LIVE:
            return self.say(f"please wait: {self.ui.busy}" if self.ui.busy else refusal)
        self.ui.busy = busy
        self.redraw()
        self.run_worker(self._command(command, *options, then=then), exclusive=True)

    async def _command(self, command: str, *options: str, then: str) -> None:
        """Run a command of distdiag on this run; show its error, or the page `then` if it has none."""
        text = ""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "distdiag", command, str(self.snap.run), *options,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, errors = await process.communicate()
            if process.returncode:
                lines = errors.decode(errors="replace").strip().splitlines()
                text = next((x for x in lines if x.startswith("distdiag")), lines[0] if lines else "")
                text = text or f"distdiag {command} ended with code {process.returncode}"
        except OSError as e:
            text = f"cannot start distdiag {command}: {e.strerror}"
        self.ui.busy = ""
        self.ui.message = text
        if then and not text:
            self.ui.page = then
        self.source.again()
        self.redraw()
