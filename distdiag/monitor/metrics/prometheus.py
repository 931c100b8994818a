"""Serve /metrics in a separate thread: few connections, and a text that is made once per poll.

A scraper that sends slowly, never reads, or asks all the time costs a connection; the monitor's thread waits for none of it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from distdiag.errors import described
from distdiag.monitor.metrics.table import METRICS, Poll, Ranks

CONNECTIONS = 8  # at a time; the oldest is closed for the next
PATIENCE_S = 5.0  # for a request to arrive, and for an answer to be taken
PATH = "/metrics"


def text_of(poll: Poll) -> bytes:
    return generate_latest(_Families(poll))  # type: ignore[arg-type]


class _Families:
    """What `generate_latest` asks a registry for."""

    def __init__(self, poll: Poll) -> None:
        self._ranks = Ranks(poll)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for m in METRICS:
            family = (CounterMetricFamily if m.counter else GaugeMetricFamily)(m.prometheus, m.help, labels=m.labels)
            for labels, value in m.values(self._ranks):
                family.add_metric(labels, value)
            yield family


class MetricsServer(ThreadingHTTPServer):
    """The HTTP server of one monitor.

    Raises:
        OSError: the address is in use, or not one of this host.
    """

    daemon_threads = True
    request_queue_size = 2 * CONNECTIONS

    def __init__(self, address: tuple[str, int], latest: Callable[[], Poll | None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.named = address[0].lower()
        super().__init__(address, _Handler)
        self._latest = latest
        self.failure: str | None = None  # the first of ours
        self._open: list[Any] = []  # sockets, oldest first
        self._open_lock, self._text_lock = threading.Lock(), threading.Lock()
        self._text: tuple[Poll | None, bytes] = (None, b"")
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    @property
    def where(self) -> str:
        host, port = self.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def server_bind(self) -> None:
        """Bind as a TCP server does: HTTPServer also looks up the host's name, which may wait for a DNS server."""
        TCPServer.server_bind(self)

    def text(self) -> bytes:
        """Return the newest poll as text; one thread makes it, once."""
        poll = self._latest()
        with self._text_lock:
            if poll is not None and poll is not self._text[0]:
                self._text = (poll, text_of(poll))
            return self._text[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            oldest = self._open.pop(0) if len(self._open) >= CONNECTIONS else None
            self._open.append(request)
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: stderr is the job's. A scraper that goes away is no event; what else fails is reported in run.db."""
        error = sys.exception()
        if self.failure is None and isinstance(error, Exception) and not isinstance(error, OSError):
            self.failure = described(error)


def _host(header: str) -> str:
    """Return the host in a Host header, without its port; that of a request without one is this one."""
    try:
        return (urlsplit(f"//{header}").hostname or "") if header else "localhost"
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE_S
    server: MetricsServer
    server_version, sys_version = "distdiag", ""

    def do_GET(self) -> None:
        asked = _host(self.headers.get("Host", ""))
        if _is_loopback(str(self.server.server_address[0])) and not (asked == self.server.named or _is_loopback(asked)):
            self.send_error(403, explain="the metrics are for this host only")  # a web page, by DNS rebinding
            return
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, explain=f"the metrics are at {PATH}")
            return
        text = self.server.text()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: stderr is the job's."""
