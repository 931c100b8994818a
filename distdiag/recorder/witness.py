"""The witness: torch's C++ worker server on a unix socket. It responds even while a thread holds the GIL and does not return.

It serves the flight recorder and all stacks to the monitor. The socket is in a directory of mode 0700. Its handlers are C++'s:
`torch.distributed.debug` adds one in Python, which C++ destroys when Python is gone (ddtrace: SIGABRT).

The server's thread aborts the process if its socket is closed, and a script may close descriptors that it did not open
(`os.closerange`). So the server has a separate descriptor table, in which only its sockets are open.
"""

from __future__ import annotations

import _socket
import ctypes
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from distdiag.unpatched import Lock, get_native_id, now_s, sleep, start_new_thread

MAX_SOCKET_PATH = 107  # sockaddr_un
FATAL = 3  # a log level of c10
ANSWER_S = 1.0
BUSY_S = 2.0  # for requests in progress to end
LISTENS = "00010000"  # flags of a listening socket in /proc/net/unix
CLOSE_RANGE, UNSHARE = 436, 2  # number of the system call on all architectures (Linux 5.9); its flag


class Server:
    """The server, and the thread that made it: a descriptor table belongs to a thread, and only this one has the server's.

    The thread is started below `threading`, as the pulse is, and waits in one call until the server is to be shut down.
    """

    def __init__(self, server_class: Any, path: Path, level: ctypes.c_int) -> None:
        self._error: BaseException | None = None
        self._made, self._ending, self._ended = (Lock() for _ in range(3))
        for lock in (self._made, self._ending, self._ended):
            lock.acquire()
        start_new_thread(self._run, (server_class, str(path), level, get_native_id()))
        self._made.acquire()
        if self._error is not None:
            raise self._error

    def _run(self, server_class: Any, path: str, level: ctypes.c_int, creator: int) -> None:
        try:
            if get_native_id() == creator:  # it would close all that the script has open
                raise RuntimeError("this is the thread that started it: thread functions are patched")
            _own_descriptors()
            with _only_fatal(level):
                server = server_class(path)
            # Shut down, never destroyed: run in a forked child (a DataLoader worker that drops its copy), its destructor would
            # close the listening socket under the parent's thread, which aborts the parent.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
        except BaseException as e:
            self._error = e
            return
        finally:
            self._made.release()
        self._ending.acquire()
        try:
            with _only_fatal(level):
                server.shutdown()
        finally:
            self._ended.release()

    def shutdown(self) -> None:
        """End the server; it must have no request in progress."""
        self._ending.release()
        self._ended.acquire()


def _own_descriptors() -> None:
    """Give this thread an empty descriptor table; where the kernel has no such call, it keeps that of the process.

    Empty, because a copy of the script's pipes would keep them open after the script has closed them.
    """
    if ctypes.CDLL(None).syscall(CLOSE_RANGE, ctypes.c_uint(0), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(UNSHARE)) == 0:
        for _ in range(3):  # what is printed there goes nowhere
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def start(path: Path) -> Server | None:
    """Start the server on `path` and return it, to be shut down later; None if this version of torch has no server.

    Raises:
        RuntimeError, OSError: it could not listen.
    """
    from torch._C import _distributed_c10d as c10d

    server_class = getattr(c10d, "_WorkerServer", None)
    if server_class is None or len(os.fsencode(path)) > MAX_SOCKET_PATH:
        return None
    level = _log_level()
    if level is None:  # the server would print into the job's stderr
        return None
    path.unlink(missing_ok=True)
    return Server(server_class, path, level)


def stop(server: Server, path: Path) -> None:
    """Shut the server down; leave it to the end of the process if it does not respond, or stays busy.

    `shutdown` waits for requests in progress while it holds the GIL, and most handlers need the GIL. So first the socket is
    renamed, which no new request survives, and those in progress end. A shutdown before the server's thread has started to serve
    never returns, either.
    """
    closing = path.with_suffix(".closing")
    try:
        path.rename(closing)
    except OSError:  # the directory is gone: nobody can ask, but it is not known who is being answered
        return
    try:
        if _answers(closing) and _idle(path):
            server.shutdown()
    finally:
        closing.unlink(missing_ok=True)


def _idle(path: Path) -> bool:
    """Wait until the server has no connection any more; False if it still has one after `BUSY_S`."""
    name, deadline, sockets = f" {path}", now_s() + BUSY_S, Path("/proc/self/net/unix")
    while any(
        line.endswith(name) and line.split()[3] != LISTENS
        for line in sockets.read_text(errors="surrogateescape").split("\n")
    ):
        if now_s() > deadline:
            return False
        sleep(0.005)
    return True


def _answers(path: Path) -> bool:
    """True if the server on `path` responds to a request within `ANSWER_S`."""
    request = b"POST /handler/ping HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    # below `socket`, whose functions gevent replaces
    with closing(_socket.socket(_socket.AF_UNIX)) as connection:
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
