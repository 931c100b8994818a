"""What the app does on request besides reading: a snapshot, a picture, `distdiag dump`, `distdiag profile`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from distdiag.store.liveness import Monitor
from distdiag.tui import once
from distdiag.tui.data.state import job_state
from distdiag.tui.draw.text import quote
from distdiag.tui.navigation import Viewer

MANY_RANKS = 8  # of more than that, two are profiled: the slowest and one with the median time


class Files:
    """Writes files and starts processes; everything else of the app only reads."""

    def __init__(self, app: Viewer) -> None:
        self.app = app

    def _free_name(self, suffix: str) -> Path:
        stem = f"distdiag-{self.app.snap.run.resolve().name}-{time.strftime('%H%M%S')}"
        path, n = Path(f"{stem}.{suffix}"), 2
        while path.exists():
            path, n = Path(f"{stem}-{n}.{suffix}"), n + 1
        return path

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.write_bytes(data)
            self.app.say(f"written: {path}")
        except OSError as e:
            self.app.say(f"cannot write {path}: {e.strerror}")

    def action_export(self) -> None:
        self._write(self._free_name("json"), once.as_json(self.app.snap) + b"\n")

    def action_picture(self) -> None:
        title = f"distdiag tui {quote(self.app.snap.run)}"
        self._write(self._free_name("svg"), self.app.canvas.picture(title).encode())

    async def action_refresh_stacks(self) -> None:
        """Run `distdiag dump`, which asks the ranks for their stacks."""
        self._start("stacks can be taken while the job runs", "taking the stacks of all ranks …", "dump")

    async def action_record_profile(self) -> None:
        """Run `distdiag profile`: of the rank that is shown, of all ranks, or of the slowest and a peer if they are many."""
        if job_state(self.app.snap).word == "DEADLOCK":
            return self.app.say("no step ends any more, and a profile is of steps: r takes the stacks of all ranks")
        chosen: tuple[str, ...] = ()
        if self.app.ui.page == "rank" and self.app.ui.rank is not None:
            chosen = ("--ranks", str(self.app.ui.rank))
        elif self.app.snap.summary.n > MANY_RANKS:
            chosen = ("--culprit",)
        self._start(
            "a profile can be recorded while the job runs", "recording a profile of three steps …", "profile", *chosen,
            then="profile",
        )  # fmt: skip

    def _start(self, refusal: str, busy: str, command: str, *options: str, then: str = "") -> None:
        if self.app.ui.busy or self.app.snap.monitor is not Monitor.LIVE:
            return self.app.say(f"please wait: {self.app.ui.busy}" if self.app.ui.busy else refusal)
        self.app.ui.busy = busy
        self.app.redraw()
        self.app.run_worker(self._command(command, *options, then=then), exclusive=True)

    async def _command(self, command: str, *options: str, then: str) -> None:
        """Run a command of distdiag on this run; show its error, or the page `then` if it has none."""
        text = ""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "distdiag", command, str(self.app.snap.run), *options,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, errors = await process.communicate()
            if process.returncode:
                lines = errors.decode(errors="replace").strip().splitlines()
                text = next((x for x in lines if x.startswith("distdiag")), lines[0] if lines else "")
                text = text or f"distdiag {command} ended with code {process.returncode}"
        except OSError as e:
            text = f"cannot start distdiag {command}: {e.strerror}"
        self.app.ui.busy = ""
        self.app.ui.message = text
        if then and not text:
            self.app.ui.page = then
        self.app.source.again()
        self.app.redraw()
