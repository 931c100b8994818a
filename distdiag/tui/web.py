"""The same app in a browser: on the loopback interface only, behind a token that is printed with the address."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from distdiag.errors import DistdiagError, ExitCode, need
from distdiag.streams import say
from distdiag.tui.draw.text import clean

HOST = "127.0.0.1"
COOKIE = "distdiag_token_{port}"  # browsers share the cookies of a host between its ports
_LEAVE_S = 3.0  # given to an app to leave when the server ends, before it is killed


def app_command(arguments: list[str]) -> str:
    """Return the command of a browser session: this one (its words after `distdiag`), without the server's options."""
    words = iter(arguments)
    kept = [w for w in words if w != "--web" and not w.startswith("--port=") and not (w == "--port" and next(words, w))]
    return shlex.join([sys.executable, "-m", "distdiag", *kept])


def listener(port: int) -> socket.socket:
    """Return a socket that listens on `port` of the loopback interface, or on any free one for 0."""
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((HOST, port))
        s.listen(64)
    except OSError as e:
        s.close()
        text = f"port {port} on {HOST} cannot be used: {e.strerror}"
        raise DistdiagError(text, "leave --port out: any free one is taken") from e
    return s


# what the page loads by itself; its own server's address is complete, too
_LOADED = re.compile(r"<(?:link|script)\b[^>]*?(?:href|src)=\"((?:https?:)?//[^\"]*)\"[^>]*>(?:</script>)?", re.DOTALL)
_HEAD = """
<link rel="icon" href="data:,">
<style>@font-face { font-family: "Roboto Mono"; src: url("/static/fonts/RobotoMono-VariableFont_wght.ttf"); }</style>
<script>
  // the terminal takes keys as soon as the app has drawn, and again when the window gets the focus; on focus it
  // writes to its socket, which must be open by then
  function focusTerminal() {
    const input = document.querySelector("body.-first-byte .xterm-helper-textarea");
    if (input) input.focus();
    return Boolean(input);
  }
  const waiting = setInterval(() => { if (focusTerminal()) clearInterval(waiting); }, 50);
  window.addEventListener("focus", focusTerminal);
</script>
</head>"""


def own_page(html: str, here: str) -> str:
    """Return the page of textual-serve without what it loads from other hosts, and with the terminal in focus."""
    html = _LOADED.sub(lambda m: m[0] if m[1].startswith(f"{here}/") else "", html)
    return html.replace("</head>", _HEAD, 1)


def _token_guard(token: str, port: int) -> Any:
    """Return middleware that refuses requests without the token, and moves it from the address into a cookie.

    The Host header is checked too, so that a foreign page cannot reach the server under another name (DNS rebinding),
    and the Origin of the websocket, so that it cannot use the cookie.
    """
    from aiohttp import web

    cookie = COOKIE.format(port=port)
    here = f"http://{HOST}:{port}"
    # no other server may learn that the page was opened, whatever a later textual-serve asks for
    policy = f"default-src {here} data: blob: 'unsafe-inline' 'unsafe-eval'; connect-src {here} ws://{HOST}:{port}"

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.query.get("token") or request.cookies.get(cookie) or ""
        origin = request.headers.get("Origin")
        if request.headers.get("Host") != f"{HOST}:{port}" or origin not in (None, here):
            raise web.HTTPForbidden(text="distdiag: not from this host\n")
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise web.HTTPForbidden(
                text="distdiag: open the address that `distdiag tui --web` printed, token included\n"
            )
        response = await handler(request)
        if not response.prepared:  # a websocket has answered already
            if request.path == "/" and isinstance(response, web.Response) and response.text:
                response.text = own_page(response.text, here)
            response.headers["Content-Security-Policy"] = policy
            response.headers["Referrer-Policy"] = "no-referrer"
            if "token" in request.query:
                response.set_cookie(cookie, token, httponly=True, samesite="Strict")
        return response

    return guard


def serve(run_dir: Path, port: int, arguments: list[str]) -> int:
    """Serve until Ctrl-C, so the code is 130; prints the address with its token on stdout."""
    need(("textual", "textual_serve"), "--web")
    from aiohttp import web
    from textual_serve import server as textual_server

    listening = listener(port)
    port = listening.getsockname()[1]
    secret = secrets.token_urlsafe(24)

    apps: list[Any] = []  # one per browser that came

    class App(textual_server.AppService):
        async def start(self, width: int, height: int) -> None:
            apps.append(self)
            await super().start(width, height)

    class Guarded(textual_server.Server):
        async def _make_app(self) -> Any:
            app = await super()._make_app()
            app.middlewares.append(_token_guard(secret, port))
            return app

        async def on_startup(self, app: Any) -> None:
            # the socket listens already: whoever reads the address can connect to it
            say(f"http://{HOST}:{port}/?token={secret}", flush=True)
            say(f"distdiag: serving {clean(str(run_dir))} to this machine only; Ctrl-C ends it", err=True)
            say(f"hint: from elsewhere: ssh -L {port}:{HOST}:{port} HOST, then open that address", err=True)

        async def on_shutdown(self, app: Any) -> None:
            await asyncio.gather(*(_ended(a) for a in apps))

    textual_server.AppService = App  # the server has no other way to set the class it starts
    server = Guarded(app_command(arguments), host=HOST, port=port, title="distdiag")
    web.run_app(server._make_app(), sock=listening, print=None, access_log=None)
    return int(ExitCode.INTERRUPTED)


async def _ended(app: Any) -> None:
    """End one browser's app and wait for its process: the loop must not close before its pipes have."""
    process = app._process
    if process is None:
        return
    with contextlib.suppress(Exception):
        await asyncio.wait_for(app.stop(), _LEAVE_S)
    try:
        await asyncio.wait_for(process.wait(), _LEAVE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
