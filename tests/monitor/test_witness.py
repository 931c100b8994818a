"""The witness of a rank is asked only if this user runs it: the path of its socket comes from a page."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from distdiag.monitor.evidence import ask


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a socket of another user")
def test_a_socket_of_another_user_is_not_asked() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = Path(folder) / "r0.sock"
        server.bind(str(path))
        os.seteuid(65534)
        try:
            server.listen()  # the kernel records the owner of the server now
        finally:
            os.seteuid(0)
        with pytest.raises(PermissionError, match="another user"):
            ask.ask(str(path), "fr_trace_json", timeout_s=1.0)
        asked, _ = server.accept()
        with asked:
            assert asked.recv(100) == b""  # closed without a request
