"""The witness: torch's C++ worker server on a unix socket. It responds even while a thread holds the GIL and does not return.

It serves the flight recorder and all stacks to the monitor. The socket is in a directory of mode 0700.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_SOCKET_PATH = 107  # sockaddr_un
FATAL = 3  # a log level of c10
ANSWER_S = 1.0
BUSY_S = 2.0  # for requests in progress to end
LISTENS = "00010000"  # flags of a listening socket in /proc/net/unix


def start(path: Path) -> Any:
    """Start the server on `path` and return it, to be shut down later; None if this version of torch has no server.

    Raises:
        RuntimeError, OSError: it could not listen.
    """
    from torch._C import _distributed_c10d as c10d

    server_class = getattr(c10d, "_WorkerServer", None)
    if server_class is None or len(os.fsencode(path)) > MAX_SOCKET_PATH:
        return None
    # importing it registers the handlers and starts nothing
    import torch.distributed.debug  # noqa: F401

    level = _log_level()
    if level is None:  # the server would print into the job's stderr
        return None
    path.unlink(missing_ok=True)
    with _only_fatal(level):
        server = server_class(str(path))
    # Shut down, never destroyed: run in a forked child (a DataLoader worker that drops its copy), its destructor would close the
    # listening socket under the parent's thread, which aborts the parent.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    return server


def stop(server: Any, path: Path) -> None:
    """Shut the server down; leave it to the end of the process if it does not respond, or stays busy.

    `shutdown` waits for requests in progress while it holds the GIL, and most handlers need the GIL. So first the socket is
    renamed, which no new request survives, and those in progress end. A shutdown before the server's thread has started to serve
    never returns, either.
    """
    level = _log_level()
    closing = path.with_suffix(".closing")
    try:
        path.rename(closing)
    except OSError:  # the directory is gone: nobody can ask, but it is not known who is being answered
        return
    try:
        if level is not None and _answers(closing) and _idle(path):
            with _only_fatal(level):
                server.shutdown()
    finally:
        closing.unlink(missing_ok=True)


def _idle(path: Path) -> bool:
    """Wait until the server has no connection any more; False if it still has one after `BUSY_S`."""
    name, deadline = f" {path}", time.monotonic() + BUSY_S
    while any(line.rstrip("\n").endswith(name) and line.split()[3] != LISTENS for line in _unix_sockets()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _unix_sockets() -> list[str]:
    with open("/proc/self/net/unix", errors="surrogateescape") as f:
        return f.readlines()


def _answers(path: Path) -> bool:
    """True if the server on `path` responds to a request within `ANSWER_S`."""
    request = b"POST /handler/ping HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
            connection.sendall(request)
            return bool(connection.recv(16))
        except OSError:
            return False


def _log_level() -> ctypes.c_int | None:
    """Return the variable in libc10 that holds torch's minimum C++ log level; None if this torch has none."""
    import torch

    try:
        # already loaded: the same library
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


@contextmanager
def _only_fatal(level: ctypes.c_int) -> Iterator[None]:
    """Suppress torch's C++ warnings while the server starts and ends; stderr itself is not touched."""
    before = level.value
    level.value = FATAL
    try:
        yield
    finally:
        level.value = before
