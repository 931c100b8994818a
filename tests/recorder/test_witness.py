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


CLOSES_ALL = """
import os, select, socket, sys, time
from pathlib import Path
import torch.distributed
from distdiag.recorder import witness

reading, writing = os.pipe()
before = set(os.listdir("/proc/self/fd"))
path = Path(sys.argv[1])
server = witness.start(path)
assert set(os.listdir("/proc/self/fd")) == before  # it takes no number from the script
os.close(writing)
assert os.read(reading, 1) == b""  # nobody else has the other end
os.closerange(3, 4096)
mine = socket.create_server(("127.0.0.1", 0), reuse_port=True)
others = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
time.sleep(0.5)  # the server checks its socket ten times a second
for fd in others:
    os.fstat(fd)
with socket.create_connection(mine.getsockname()):
    mine.accept()
assert witness._answers(path)
witness.stop(server, path)
print("stopped", flush=True)
"""


def test_a_script_that_closes_all_its_files_goes_on() -> None:
    """torch's server aborts its process if its socket is closed, and would take over the script's if that gets the same number."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", CLOSES_ALL, str(Path(folder) / "r0.sock")],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")


def test_without_the_system_call_the_server_runs_among_the_files_of_the_script() -> None:
    """Linux before 5.9, or a sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"import distdiag.recorder.witness as w; w.CLOSE_RANGE = 100_000; exec({ENDS_AT_ONCE!r})"
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(folder) / "r0.sock")],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nstopped\n", "")


ENDS_AT_ONCE = """
import sys
from pathlib import Path
import torch.distributed
from distdiag.recorder import witness

path = Path(sys.argv[1])
server = witness.start(path)
print(witness._answers(path), flush=True)
witness.stop(server, path)
print("stopped", flush=True)
"""


IN_THE_CALLING_THREAD = """
import os, sys
from pathlib import Path
import torch.distributed
from distdiag.recorder import witness

witness.start_new_thread = lambda function, args: function(*args)
before = set(os.listdir("/proc/self/fd"))
try:
    witness.start(Path(sys.argv[1]))
except RuntimeError as e:
    print(e, set(os.listdir("/proc/self/fd")) == before, flush=True)
os._exit(0)
"""


def test_a_server_without_a_thread_of_its_own_closes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_THE_CALLING_THREAD, str(tmp_path / "r0.sock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "this is the thread that started it: thread functions are patched True\n"
