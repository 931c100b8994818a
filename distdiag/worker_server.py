"""Asks torch's worker server: HTTP on a unix socket of one rank, served by C++, which answers while the rank waits or holds the GIL."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import struct
import threading

TIMEOUT_S = 3.0
MOST_BYTES = 64 << 20  # of an answer
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float, pid: int | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path, self._pid = path, pid

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        pid, owner = peer_of(self.sock)
        # the path comes from a page or an environment, which may be another user's
        if owner != os.getuid() and not (self._pid is not None and owner == 0):
            raise PermissionError(errno.EACCES, "is served by another user")
        if self._pid not in (None, pid):
            raise PermissionError(errno.EACCES, f"is served by process {pid}")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a unix socket."""
    pid, owner, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, owner


def ask(socket_path: str, handler: str, timeout_s: float = TIMEOUT_S, pid: int | None = None) -> bytes:
    """Return the body of the server's answer.

    Args:
        timeout_s: For the whole answer: a hostile server may send a byte a second.
        pid: The only process that may serve it, of this user or root; None: any process of this user.

    Raises:
        OSError, http.client.HTTPException: no answer, an error, or another user's server.
    """
    connection = _UnixConnection(socket_path, timeout_s, pid)
    late = threading.Event()
    try:
        connection.connect()
        sock = connection.sock  # the connection forgets it before the body is read

        def end() -> None:
            late.set()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            connection.request("POST", f"/handler/{handler}")
            response = connection.getresponse()
            body = response.read(MOST_BYTES)
        except (OSError, http.client.HTTPException):
            if not late.is_set():
                raise
            body = b""
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
        if response.status != 200:  # type: ignore[possibly-undefined]
            raise http.client.HTTPException(f"{handler}: HTTP {response.status}")
        return body
    finally:
        connection.close()
