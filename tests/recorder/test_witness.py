"""The witness ends with its process, also while it answers a request."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

ENDS = """
import sys, threading
from pathlib import Path
import torch.distributed
from torch._C._distributed_c10d import _register_handler
from distdiag.recorder import witness

begun = threading.Event()

def slow(request, response):
    begun.set()
    ended.wait(0.5)  # a handler that needs the GIL again
    response.set_content("answered", "text/plain")
    response.set_status(200)

ended = threading.Event()
_register_handler("slow", slow)
path = Path(sys.argv[1])
server = witness.start(path)
print("ready", flush=True)
assert begun.wait(30)
witness.stop(server, path)
print("stopped", flush=True)
"""


def test_a_request_in_progress_does_not_hang_the_end_of_the_process() -> None:
    """torch's server waits for its requests with the GIL held, and the request needs the GIL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r0.sock"
        process = subprocess.Popen([sys.executable, "-c", ENDS, str(path)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            with socket.socket(socket.AF_UNIX) as asks:
                asks.settimeout(60)
                asks.connect(str(path))
                asks.sendall(
                    b"POST /handler/slow HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                answer = b"".join(iter(lambda: asks.recv(4096), b""))
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert (process.returncode, out) == (0, "stopped\n")
        assert answer.endswith(b"answered")
        assert list(Path(folder).iterdir()) == []
