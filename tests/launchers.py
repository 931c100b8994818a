"""Launchers of test jobs: one process imports torchrun and forks a launcher for each job.

Importing torchrun takes 3 s of CPU, a quarter of the total of a small job of two ranks. A forked launcher runs torchrun's own `main`
and is the same for its ranks: their parent, the leader of a session, with the job's environment, directory, outputs and exit
status. It starts its ranks as always, each with its own import of torch. Tests of the launch itself start torchrun as a command.

The ranks can be forked as well, which saves 4 s of CPU each. They have torch before the recorder is installed, as with `attach()`,
and nothing watches them as torchrun would: for jobs whose start is not asserted, nor how a failed rank ends the others.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

NOTICED_S, GRACE_S = 0.1, 30.0  # torchrun's: between two looks at the ranks, and between SIGTERM and SIGKILL
CLONE_NEWTIME, CLONE_NEWNET = 0x80, 0x40000000
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Place:
    """Where forked ranks run, see `tests/nodes.py`.

    Attributes:
        network: Name of their network namespace.
        ahead_s: Seconds by which their monotonic clock is ahead.
    """

    network: str
    ahead_s: int = 0


class Server:
    """The process that forks launchers. It is not a child of this process, and ends when this process has closed its socket.

    Args:
        python_path: PYTHONPATH of the forked ranks, which import nothing anew: a `sitecustomize.py` there runs once, in this server.
    """

    def __init__(self, python_path: str) -> None:
        self._socket, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if "TEST_MARK" not in k}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path}
        with theirs:
            subprocess.run(
                [sys.executable, "-m", "tests.launchers", str(theirs.fileno())],
                cwd=REPOSITORY, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True, check=True,
            )  # fmt: skip
        self._answers = self._socket.makefile("r")
        self._turn = threading.Lock()  # jobs of a collection are started and polled in threads

    def ask(self, **request: Any) -> int | None:
        """Return the answer to one request.

        Raises:
            EOFError: the server has ended.
        """
        try:
            with self._turn:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                answer = self._answers.readline()
        except BaseException:  # an interrupted test has left an answer that does not belong to the next request
            self.close()
            raise
        if not answer:
            self.close()
            raise EOFError("the server of launchers has ended; start it by hand: python -m tests.launchers 0")
        return json.loads(answer)

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0


_servers: dict[str, Server] = {}  # of this process, by their PYTHONPATH


class Launcher:
    """A forked launcher, with the methods and attributes of `subprocess.Popen` that tests use.

    Args:
        arguments: Arguments of torchrun; with `forked_ranks`, the program and its arguments.
        stdout, stderr: Existing files.
        forked_ranks: If not 0: this many ranks are forked instead of torchrun and run the program, in the session of the launcher.
            They are a whole job, unless `env` has the WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT of a larger one.
        place: Where forked ranks run; None: here.
    """

    stdin = None  # the server keeps it open

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        forked_ranks: int = 0,
        place: Place | None = None,
    ) -> None:
        path = env.get("PYTHONPATH", "") if forked_ranks else ""
        if path not in _servers or _servers[path].closed:
            _servers[path] = Server(path)
        self._server = _servers[path]
        self.returncode: int | None = None
        self.forked_ranks = forked_ranks
        pid = self._server.ask(
            arguments=list(arguments),
            cwd=str(cwd),
            env=dict(env),
            stdout=str(stdout),
            stderr=str(stderr),
            forked_ranks=forked_ranks,
            place=asdict(place) if place else None,
        )
        assert pid is not None
        self.pid = pid

    def poll(self) -> int | None:
        if self.returncode is None and not self._server.closed:
            self.returncode = self._server.ask(pid=self.pid)
        elif self.returncode is None and not Path(f"/proc/{self.pid}").exists():
            self.returncode = -signal.SIGKILL  # its exit status was lost with the server
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Answer requests until there are no more; return None then, and in each forked launcher return its request."""
    inputs: dict[int, int] = {}  # pipe of each launcher: its stdin stays open and silent while it lives
    lines = requests.makefile("r")
    while line := lines.readline():
        request = json.loads(line)
        answer: int | None = None
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            if pid:
                answer = os.waitstatus_to_exitcode(status)
                os.close(inputs.pop(pid))
        else:
            theirs, ours = os.pipe()
            answer = os.fork()
            if answer == 0:
                os.dup2(theirs, 0)
                os.close(theirs)
                for end in (ours, *inputs.values()):
                    os.close(end)
                return request
            os.close(theirs)
            inputs[answer] = ours
        requests.sendall(json.dumps(answer).encode() + b"\n")
    return None


def _become(request: dict[str, Any]) -> None:
    """Become the launcher of `request` up to the call of torchrun: session, directory, environment, outputs, arguments."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for name, number in (("stdout", 1), ("stderr", 2)):
        fd = os.open(request[name], os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = ["torchrun", *request["arguments"]]
    if request["place"]:
        _enter(Place(**request["place"]))


def _enter(place: Place) -> None:
    """Change into the network namespace of `place`; processes that are forked from now on have its clock, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{place.network}") as network:
        failed = libc.setns(network.fileno(), CLONE_NEWNET)
    if place.ahead_s and not failed:
        failed = libc.unshare(CLONE_NEWTIME)
        Path("/proc/self/timens_offsets").write_text(f"monotonic {place.ahead_s} 0\n")
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter {place}")


def _fork_ranks(number: int) -> int | None:
    """Fork the ranks of this host; return None in each rank, and in the parent the exit code once all have ended."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(WORLD_SIZE=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    os.environ["LOCAL_WORLD_SIZE"] = str(number)
    first = number * int(os.environ.get("GROUP_RANK", "0"))
    ranks: set[int] = set()
    for local in range(number):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(first + local), LOCAL_RANK=str(local))
            return None
        ranks.add(pid)
    code, kill_at = 0, float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(NOTICED_S)
        ranks.discard(pid)
        if pid and status and not code:  # as torchrun does: the first failure ends the others
            code, kill_at = 1, time.monotonic() + GRACE_S
            for other in ranks:
                os.kill(other, signal.SIGTERM)
        if time.monotonic() > kill_at:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return code


def _run_program(program: list[str]) -> None:
    """Run `-m MODULE ARGS…` or `SCRIPT ARGS…` as Python itself would."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    connection = socket.socket(fileno=int(sys.argv[1]))
    import gc
    import importlib

    from torch.distributed import run

    from distdiag import torchrun_compat

    importlib.import_module("torch._dynamo")  # 2 s more, needed by DDP and the optimizers in forked ranks
    gc.freeze()  # a garbage collection in a launcher would copy memory that it shares with this process
    wanted = _serve(connection)
    connection.close()
    if wanted is not None:
        _become(wanted)
        if not wanted["forked_ranks"]:
            torchrun_compat.autoload()  # torch's import calls it, with the launcher's own arguments
            run.main()
        elif (ended := _fork_ranks(wanted["forked_ranks"])) is None:
            _run_program(wanted["arguments"])
        else:
            sys.exit(ended)
