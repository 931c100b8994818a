"""A headless Chromium for tests, driven through its own protocol; tests are skipped on a machine without one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 90.0
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


class Tab:
    """One page of the browser.

    Attributes:
        requested: Every address that the page asked for, websockets included.
        problems: Errors of its scripts, and error messages in its console.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._sent = 0
        self.requested: list[str] = []
        self.problems: list[str] = []

    async def listen(self) -> None:
        """Sort what the browser sends; runs until the socket closes."""
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                answer = self._answers.pop(data["id"])
                if not answer.done():
                    answer.set_result(data)
                continue
            given = data.get("params", {})
            if data["method"] == "Network.requestWillBeSent":
                self.requested.append(given["request"]["url"])
            elif data["method"] == "Network.webSocketCreated":
                self.requested.append(given["url"])
            elif data["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(given["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded" and given["entry"]["level"] == "error":
                self.problems.append(str(given["entry"]))

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Return the result of one command."""
        self._sent += 1
        number = self._sent
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(DEADLINE_S):
            data = await answer
        assert "error" not in data, (method, data["error"])
        return data["result"]

    async def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, address: str, width: int, height: int, scheme: str = "light") -> None:
        """Load a page in a window of this size, and wait until it has been loaded."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call("Page.navigate", url=address)
        await self.until(f"document.readyState == 'complete' && location.href.startsWith({address[:20]!r})")

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self.value(expression):
                await asyncio.sleep(0.1)

    async def picture(self, good: Callable[[bytes], bool], keep: Path) -> bytes:
        """Return the first screenshot (PNG) that is good; the last one is kept in a file."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                png = base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])
                keep.write_bytes(png)
                if good(png):
                    return png
                await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def tab(folder: Path) -> AsyncIterator[Tab]:
    """Start a browser whose profile is in `folder`; yields an empty page."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    aiohttp = pytest.importorskip("aiohttp", reason="no aiohttp to drive the browser with")
    process = subprocess.Popen(
        [program, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(DEADLINE_S):
                address = await _address(session, folder / "profile" / "DevToolsActivePort")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Tab(socket)
                listening = asyncio.create_task(page.listen())
                yield page
                listening.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _address(session: Any, announced: Path) -> str:
    """Return the websocket of the browser's first page, once it is there."""
    while True:
        port = announced.read_text().partition("\n")[0] if announced.exists() else ""
        if port:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                for page in await answer.json(content_type=None):
                    if page["type"] == "page":
                        return page["webSocketDebuggerUrl"]
        await asyncio.sleep(0.1)
