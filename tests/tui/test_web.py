"""The app in a browser: loopback only, nothing without the token, and it is the same app."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from distdiag.tui.web import COOKIE, app_command, own_page
from tests import browser
from tests.tui.conftest import MakeRun
from tests.tui.synthetic import Scenario

aiohttp = pytest.importorskip("aiohttp", reason="the extra 'web' is not installed")
pytest.importorskip("textual_serve", reason="the extra 'web' is not installed")


@pytest.fixture
def server(runs: MakeRun) -> Iterator[str]:
    """Return the address of a running `distdiag tui --web`, token included."""
    run = runs(Scenario(state="deadlocked", ranks=8), "always")
    process = subprocess.Popen(
        [sys.executable, "-m", "distdiag", "tui", str(run), "--web"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, text=True, start_new_session=True, env={**os.environ, "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        address = process.stdout.readline().strip()
        assert address, process.stderr.read()
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        output = process.stderr.read()
        assert "Traceback" not in output, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_the_page_asks_no_other_host_and_takes_keys_at_once() -> None:
    page = """<html><head><link rel="stylesheet" href="http://127.0.0.1:8000/static/css/xterm.css" />
    <link
      rel="stylesheet"
      href="https://fonts.googleapis.com/css?family=Roboto%20Mono"
    />
    <script src="//cdn.example/x.js"></script><script src="http://127.0.0.1:8000/static/js/textual.js"></script></head></html>"""
    text = own_page(page, "http://127.0.0.1:8000")
    assert set(re.findall(r"//([\w.:]+)/", text)) == {"127.0.0.1:8000"}
    assert "css/xterm.css" in text and "js/textual.js" in text
    assert text.count("</head>") == 1 and ".focus()" in text


def test_the_page_served_names_no_other_host(server: str) -> None:
    parts = urlsplit(server)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=30)
    connection.request("GET", f"/?{parts.query}")
    text = connection.getresponse().read().decode()
    connection.close()
    hosts = set(re.findall(r"(?:href|src|url)=?[\"(]+(?:https?:|ws:)?//([\w.:]+)", text))
    assert hosts == {f"127.0.0.1:{parts.port}"} and "focusTerminal()" in text


def _get(address: str, path: str, **headers: str) -> http.client.HTTPResponse:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=30)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


def test_requests_without_the_token_are_refused(server: str) -> None:
    parts = urlsplit(server)
    assert parts.hostname == "127.0.0.1" and re.fullmatch(r"token=[\w-]{20,}", parts.query)
    token = parts.query.removeprefix("token=")
    for path in ("/", "/?token=", "/?token=wrong", "/ws", "/static/js/textual.js", "/download/x"):
        assert _get(server, path).status == 403, path
    good = _get(server, f"/?{parts.query}")
    cookie = good.getheader("Set-Cookie") or ""
    name = COOKIE.format(port=parts.port)
    assert str(parts.port) in name, "two servers on one machine share their cookies"
    assert good.status == 200 and f"{name}=" in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert f"connect-src http://127.0.0.1:{parts.port} " in (good.getheader("Content-Security-Policy") or "")
    assert good.getheader("Referrer-Policy") == "no-referrer"
    with_cookie = {"Cookie": f"{name}={token}"}
    assert _get(server, "/", **with_cookie).status == 200
    assert _get(server, "/", Cookie=f"{name}=wrong").status == 403
    # a foreign name that resolves to this machine, and a foreign page that uses our websocket
    assert _get(server, f"/?{parts.query}", Host=f"evil.example:{parts.port}").status == 403
    assert _get(server, "/ws", Origin="http://evil.example", **with_cookie).status == 403


def test_only_this_machine_can_connect(server: str) -> None:
    port = urlsplit(server).port
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = {f[1].split(":")[0] for f in listening if int(f[1].split(":")[1], 16) == port and f[3] == "0A"}
    assert addresses == {"0100007F"}  # 127.0.0.1, as the kernel writes it
    tcp6 = Path("/proc/net/tcp6")
    assert not tcp6.exists() or f":{port:04X} " not in tcp6.read_text()


def test_the_websocket_carries_the_app(server: str) -> None:
    """Bytes of the terminal through a browser's socket: the deadlock's screen, then another one after a key."""
    parts = urlsplit(server)
    token = parts.query.removeprefix("token=")

    async def work() -> None:
        origin = f"http://127.0.0.1:{parts.port}"
        async with aiohttp.ClientSession(cookies={COOKIE.format(port=parts.port): token}) as session:
            address = f"ws://127.0.0.1:{parts.port}/ws?width=100&height=30"
            async with session.ws_connect(address, headers={"Origin": origin}) as ws:
                seen = b""

                async def until(word: bytes) -> None:
                    nonlocal seen
                    async with asyncio.timeout(60):
                        while word not in re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", seen):
                            message = await ws.receive()
                            if message.type == aiohttp.WSMsgType.BINARY:
                                seen += message.data
                            assert message.type not in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR), seen[-2000:]

                await until(b"DEADLOCK")
                await until(b"train.py:118 in next_batch")
                await ws.send_json(["stdin", "7"])
                await until(b"which line is every rank at?")

    asyncio.run(work())


def _colours(png: bytes) -> tuple[int, int, int]:
    """Return the number of different colours of a picture, and of its reddish and bluish pixels."""
    import io

    image = pytest.importorskip("PIL.Image", reason="no Pillow to look at the screenshot")
    with image.open(io.BytesIO(png)) as opened:
        shades = [(n, c) for n, c in opened.convert("RGB").getcolors(1 << 24)]
    red = sum(n for n, (r, g, b) in shades if r > 150 and r > g + 40 and r > b + 20)
    blue = sum(n for n, (r, g, b) in shades if b > 150 and b > r + 60)
    return len(shades), red, blue


def _part(png: bytes, x: float, y: float) -> bytes:
    """Return the pixels of the three lines below a point."""
    import io

    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        return image.crop((int(x), int(y) + 20, int(x) + 120, int(y) + 80)).tobytes()


def test_the_app_works_in_a_browser(server: str, tmp_path: Path) -> None:
    """A headless Chromium shows it and asks no other host; a key works without a click, and a header has a tooltip."""

    async def work() -> None:
        async with browser.tab(tmp_path) as page:
            await page.open(server, 1100, 700)
            screen = tmp_path / "screen.png"  # kept for a failed test
            # ERROR in its colour, and the keys of the key bar in their own
            home = await page.picture(lambda png: all(map(int.__gt__, _colours(png), (30, 200, 200))), screen)
            red = _colours(home)[1]
            assert await page.value("document.activeElement.className") == "xterm-helper-textarea"
            await page.call("Input.dispatchKeyEvent", type="keyDown", key="?", text="?")
            await page.picture(lambda png: _colours(png)[1] < red / 2 and _colours(png)[2] > 200, screen)  # the help
            await page.call("Input.dispatchKeyEvent", type="keyDown", key="1", text="1")
            await page.picture(lambda png: _colours(png)[1] > red / 2, screen)
            cell = await page.value(
                "(r => [r.width, r.height])(document.querySelector('.xterm-screen').getBoundingClientRect())"
            )
            columns, rows = (
                int(re.findall(rf"{name}=(\d+)", " ".join(page.requested))[0]) for name in ("width", "height")
            )
            x, y = 12.5 * cell[0] / columns, 3.5 * cell[1] / rows  # the fourth line has the columns' headers
            before = _part(home, x, y)
            await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            await page.picture(lambda png: _part(png, x, y) != before, screen)  # the tooltip, below the mouse
            here = urlsplit(server).netloc
            assert {urlsplit(u).netloc for u in page.requested if not u.startswith("data:")} == {here}
            assert page.problems == []

    asyncio.run(work())


def test_the_served_command_is_the_one_typed() -> None:
    assert app_command(["tui", "my run", "--web", "--port", "80", "--hz", "4"]).endswith(
        " -m distdiag tui 'my run' --hz 4"
    )
    assert app_command(["tui", "--port=8", "--web"]).endswith(" -m distdiag tui")


def test_a_taken_port_is_an_error_with_a_hint(runs: MakeRun) -> None:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        run = runs(Scenario(ranks=8))
        done = subprocess.run(
            [sys.executable, "-m", "distdiag", "tui", str(run), "--web", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2 and str(port) in done.stderr and "hint: leave --port out" in done.stderr
