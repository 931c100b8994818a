"""Drives the app without a terminal, and reads its screen as text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from distdiag.tui.app import DistdiagApp
from distdiag.tui.ui import Ui

DEADLINE_S = 30.0


def screen_text(app: DistdiagApp) -> str:
    """Return the whole screen; the compositor is private to the library, so this is the only place that uses it."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(s.text for s in strip).rstrip() for strip in strips) + "\n"


class Driver:
    """One app under test."""

    def __init__(self, app: DistdiagApp, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot

    async def until(self, what: Callable[[], Any], why: str = "") -> None:
        """Wait for a condition until a deadline."""
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not what():
            if asyncio.get_running_loop().time() > end:
                raise AssertionError(f"{why or 'condition'} not reached; the screen:\n{screen_text(self.app)}")
            await self.pilot.pause(0.01)

    async def settled(self) -> str:
        """Return the screen once the data of the requested page, rank, metric and time have arrived."""

        def there() -> bool:
            app = self.app
            width, height = app.canvas.size
            wanted = app.page.request(app.snap, app.ui, width, height - 1)
            return app.snap.problem is not None or (
                (app.snap.frame is not None or app.snap.monitor is not None) and wanted == app.snap.request
            )

        await self.until(there, "data for this page")
        await self.pilot.pause()
        return self.text()

    async def resize(self, width: int, height: int) -> str:
        """Resize the terminal; repeated if the library lost the event."""
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while self.app.canvas.size != (width, height):
            if asyncio.get_running_loop().time() > end:
                raise AssertionError(f"no resize to {width}x{height}; the canvas is {self.app.canvas.size}")
            await self.pilot.resize_terminal(width, height)
            await self.pilot.pause(0.02)
        return await self.settled()

    async def press(self, *keys: str) -> str:
        """Press keys and return the resulting screen."""
        for key in keys:
            await self.pilot.press(key)
        return await self.settled()

    def text(self) -> str:
        self.app.redraw(late=True)
        return screen_text(self.app)


@contextlib.asynccontextmanager
async def showing(
    run: Path, size: tuple[int, int] = (80, 24), ui: Ui | None = None, **options: Any
) -> AsyncIterator[Driver]:
    """Run the app on a run; yields a driver after the first complete screen."""
    app = DistdiagApp(run, ui, hz=options.pop("hz", 10.0), **options)
    async with app.run_test(size=size) as pilot:
        driver = Driver(app, pilot)
        await driver.settled()
        yield driver


def drive(work: Callable[[], Coroutine[Any, Any, None]] | Awaitable[None]) -> None:
    """Run one asynchronous test."""
    asyncio.run(work() if callable(work) else work)  # type: ignore[arg-type]
