"""The witness: torch's own C++ worker server on a unix socket, which answers even while Python is stuck holding the GIL.

It serves the flight recorder and all stacks to the monitor. The socket lies in a directory of mode 0700.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

MAX_SOCKET_PATH = 107  # sockaddr_un


def start(path: Path) -> Any:
    """Start the server on `path`; returns it, to be kept and shut down; None where this torch has none.

    Raises:
        RuntimeError, OSError: it could not listen.
    """
    from torch._C import _distributed_c10d as c10d

    server_class = getattr(c10d, "_WorkerServer", None)
    if server_class is None or len(os.fsencode(path)) > MAX_SOCKET_PATH:
        return None
    # registering the handlers is an import with side effects; it starts nothing
    import torch.distributed.debug  # noqa: F401

    path.unlink(missing_ok=True)
    with _quiet_stderr():
        server = server_class(str(path))
    # Never destroyed, only shut down: its destructor, run in a forked child (a DataLoader worker that drops its copy),
    # would close the listening socket under the parent's thread, and that aborts the parent.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    return server


def stop(server: Any) -> None:
    """Shut the server down without its parting words on the user's terminal."""
    with _quiet_stderr():
        server.shutdown()


class _quiet_stderr:
    """C++ logs its start on file descriptor 2; for these few milliseconds it goes nowhere."""

    def __enter__(self) -> None:
        self._saved = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)

    def __exit__(self, *exc: object) -> None:
        os.dup2(self._saved, 2)
        os.close(self._saved)
